"""RankMesh's agent: the collective engine, the store and the HTTP face of one rank."""

import sys

if sys.platform != "linux":
    raise ImportError(
        f"RankMesh runs on Linux, and this is {sys.platform}: it waits by epoll and futexes. Elsewhere, use it in a "
        "container, or in WSL 2 on Windows; ranks share memory on x86-64, and use TCP on other processors."
    )
