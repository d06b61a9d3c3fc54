"""Deadlines, sockets, framed streams and the HTTP client: networking without knowledge of ranks or groups."""
