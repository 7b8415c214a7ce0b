"""Late interaction: scores beside peers, whole pipelines beside peers, and quality beside one vector a text."""
