"""HTTP interface of the gateway."""
