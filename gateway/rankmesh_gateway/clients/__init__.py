"""Clients of the ranks' agents."""
