"""Helpers for training programs, laid out like torch.utils."""
