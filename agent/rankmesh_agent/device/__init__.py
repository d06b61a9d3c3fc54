"""Arrays in the memory of GPUs, the CUDA runtime, and reduction kernels."""
