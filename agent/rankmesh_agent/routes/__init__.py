"""The agent's HTTP endpoints."""
