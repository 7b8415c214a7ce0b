"""Models that find spans in texts: entities, and answers to questions."""
