"""From texts to vectors, everybody with a tokenizer: `fastbert bench --latency` and `fastbert bench --corpus FILE`."""
