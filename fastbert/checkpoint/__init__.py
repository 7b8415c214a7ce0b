"""Hugging Face checkpoints: loading, saving, and the files themselves."""
