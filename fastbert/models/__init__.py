"""Models, assembled from layers. A family is its difference from bert.py in names, configuration and heads."""
