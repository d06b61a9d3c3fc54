"""Backends: each executes the calls of one group, over shared memory, messages, or an engine of the user."""
