"""The sweep: every collective, operation, dtype, length, layout and root, over every medium, against NumPy."""
