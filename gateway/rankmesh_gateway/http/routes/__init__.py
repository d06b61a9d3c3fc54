"""Handlers of the endpoints that people and monitoring use; see ``handlers``."""
