"""Products with a weight: one or several, and the feed-forward sublayer."""
