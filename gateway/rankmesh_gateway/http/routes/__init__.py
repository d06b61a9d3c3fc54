"""Handlers of endpoints that few clients need, see ``handlers``; and the routes of all in the web framework."""
