"""A launcher of ranks that attach to standalone agents: ``python tests/support/attached_launcher.py RANKS ...``.

What follows RANKS are the arguments of Python for each rank. Gateway and agents end when all ranks have.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence

_LIFETIME = 3600


def main(arguments: Sequence[str]) -> int:
    """Run the ranks; return 1 if one of them failed."""
    size, *program = arguments
    processes: list[subprocess.Popen[str]] = []

    def service(module: str, *options: str) -> str:
        command = [sys.executable, "-m", module, "--port", "0", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        line = process.stdout.readline()  # type: ignore[union-attr]
        url = re.search(r"ready at (http://[^\s,]+)", line)
        if url is None:
            raise RuntimeError(f"{module} did not start: {line}")
        return url[1]

    try:
        gateway = service("rankmesh_gateway")
        for rank in range(int(size)):
            service("rankmesh_agent", "--gateway", gateway, "--name", f"agent-{rank}")
        place = {"RANKMESH_HOSTING": "attached", "RANKMESH_GATEWAY": gateway, "WORLD_SIZE": size}
        ranks = [
            subprocess.Popen([sys.executable, *program], env={**os.environ, **place, "RANK": str(rank)}, text=True)
            for rank in range(int(size))
        ]
        processes += ranks
        return int(any(code != 0 for code in [rank.wait(_LIFETIME) for rank in ranks]))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(10.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
