"""A vector for each token of a text, and late interaction between a query and documents (ColBERT)."""
