"""Products with a weight: one or several, and the feed-forward half of a layer."""
