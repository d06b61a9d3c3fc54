"""HTTP interface of an agent, and the HTTP server and middleware of both services."""
