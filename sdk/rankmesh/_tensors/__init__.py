"""Buffers: the elements of the tensors that users pass, as one-dimensional contiguous arrays."""
