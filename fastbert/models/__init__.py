"""Assembly: a family is the difference from bert.py in names, configuration and heads."""
