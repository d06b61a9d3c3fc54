"""HTTP endpoints of an agent."""
