"""What the launcher is made of: arguments → plan → ranks, supervised by one event loop, then a report."""
