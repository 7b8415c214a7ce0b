"""AdamW over all weights of a model at once."""
