"""The C++ extension `fastbert._C`: how it is compiled (recipe.py), which file of it is loaded (cache.py), and which
parts are there (availability.py).
"""
