"""From text to tokens: tokenizers, and the folders of sentence-transformers."""
