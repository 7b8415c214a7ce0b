"""What transformers' users and tools expect of a model and an output, beside what these are for."""
