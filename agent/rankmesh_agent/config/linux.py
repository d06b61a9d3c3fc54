"""The platform of ranks, gateways and agents: importing this module elsewhere raises ImportError."""

import sys

if sys.platform != "linux":
    raise ImportError(
        f"RankMesh's ranks, gateways and agents run on Linux, and this is {sys.platform}: they wait by epoll and "
        "futexes. Use a container, or WSL 2 on Windows; the commands that inspect a job run everywhere."
    )
