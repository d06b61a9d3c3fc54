"""Formats of all data that crosses process boundaries; imports the standard library, NumPy and ml_dtypes only."""
