"""Collectives and messages of a group on arrays in the memory of GPUs, ordered on CUDA streams."""
