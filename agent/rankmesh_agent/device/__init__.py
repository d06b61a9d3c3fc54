"""Arithmetic on GPUs, and what it needs of CuPy; imported only where a GPU is used."""
