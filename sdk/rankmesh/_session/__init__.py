"""_session."""
