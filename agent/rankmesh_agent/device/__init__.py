"""Arrays in the memory of GPUs, and the CUDA runtime."""
