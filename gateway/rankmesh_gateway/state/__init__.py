"""State of the gateway: jobs, ranks, groups, agents and events, and the file that keeps them. Without HTTP."""
