"""What pre-training reads: a corpus, and the windows that are cut from it."""
