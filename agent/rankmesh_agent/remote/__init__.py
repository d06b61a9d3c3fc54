"""Ranks in processes that attach to a standalone agent: ``agent`` is the process's side, ``server`` the agent's."""
