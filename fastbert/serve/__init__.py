"""`fastbert serve`: a model behind HTTP. Requests that arrive together are computed together, packed."""
