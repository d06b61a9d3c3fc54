"""Byte streams between two ranks, and shared memory among many; they know no collective."""
