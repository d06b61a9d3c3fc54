"""The matrix of tests/sdk/test_matrix.py: calls, operations, element types, containers, against NumPy."""
