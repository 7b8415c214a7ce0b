"""Bulk encoding on many machines: a plan of blocks, workers that read, encode and write them, and Ray Data's pools."""
