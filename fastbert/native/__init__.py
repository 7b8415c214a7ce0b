"""The C++ extension `fastbert._C`: how it is compiled (recipe.py), and which file of it is loaded (cache.py)."""
