"""What pre-training reads: a corpus, and the chunks that are cut from it."""
