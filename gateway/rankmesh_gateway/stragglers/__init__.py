"""Ranks that make the others wait: by all calls of the flight recorders, and by what each heartbeat has. Pure."""
