"""What windows gain over texts that are longer than the model: retrieval, answers, entities."""
