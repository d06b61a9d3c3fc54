"""Launcher of ranks: arguments → plan → ranks, supervised by one event loop, then a report."""
