"""Diagnostics of a process: its host, the network paths to other agents, and the stacks of its threads."""
