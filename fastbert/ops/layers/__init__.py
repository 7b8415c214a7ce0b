"""Whole layers, and a whole encoder, as one op."""
