"""State of the gateway: jobs, ranks, groups, standalone agents and events. In memory, without HTTP."""
