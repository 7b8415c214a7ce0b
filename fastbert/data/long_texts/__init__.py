"""Texts that are longer than a model takes: read piece by piece, and no further than they are needed."""
