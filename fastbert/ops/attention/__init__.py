"""Attention: the op, its backends that are not C++, rotary embedding, and terms of scores that go by distance."""
