"""What crosses process boundaries, in bytes and words; standard library and NumPy only, imported by everything."""
