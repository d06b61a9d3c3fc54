"""A process that is attached to a standalone agent, which carries its rank: ``agent`` is the process's end,
``attendance`` the agent's."""
