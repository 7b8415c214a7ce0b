"""All layers of a training step on a GPU as one op."""
