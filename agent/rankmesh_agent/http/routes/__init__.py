"""The agent's HTTP endpoints.

``view`` is what they need of an agent; ``health``, ``groups`` and ``store`` are the endpoints; ``problems`` is how
errors leave, ``hang_up`` how a wait ends when the client has gone.
"""
