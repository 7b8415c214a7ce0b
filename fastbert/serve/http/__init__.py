"""uvicorn, with what it lacks: bounds against clients that are slow or too many, a log of requests, an end in order."""
