"""What fine-tuning reads: rows of files, their labels, and their tokens."""
