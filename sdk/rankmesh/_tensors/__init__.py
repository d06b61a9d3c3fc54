"""_tensors."""
