"""_collectives."""
