"""Commands that look at a model: what it is and costs, what is inside of it, how it compares with others."""
