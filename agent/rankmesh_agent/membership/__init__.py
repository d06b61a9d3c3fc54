"""Membership of a rank in its job: the client of the gateway, and the heartbeat thread."""
