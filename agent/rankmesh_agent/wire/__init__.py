"""Formats of everything that crosses process boundaries; imports the standard library and NumPy only."""
