"""What transformers' users and tools expect of a config, a model and an output, beside what these are for."""
