"""A gateway, a standalone agent a rank, and ranks that attach to them: ``python -m benchmarks.attached RANKS …``.

In the place of a launcher: what follows RANKS are the arguments of Python for each rank. It ends when all ranks have.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence

LIFETIME = 3600.0
"""Seconds after which ranks that everybody forgot are ended."""
_READY = re.compile(r"ready at (http://[^\s,]+)")


def main(arguments: Sequence[str]) -> int:
    """Run so many ranks; return 1 if one of them failed."""
    size, *program = arguments
    services: list[subprocess.Popen[str]] = []
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        gateway = _service(services, "rankmesh_gateway", "--port", "0")
        for rank in range(int(size)):
            _service(services, "rankmesh_agent", "--port", "0", "--gateway", gateway, "--name", f"agent-{rank}")
        for rank in range(int(size)):
            found = {"RANKMESH_HOSTING": "attached", "RANKMESH_GATEWAY": gateway, "RANK": str(rank), "WORLD_SIZE": size}
            ranks.append(subprocess.Popen([sys.executable, *program], env={**os.environ, **found}))
        codes = [rank.wait(LIFETIME) for rank in ranks]
        return int(any(codes))
    finally:
        for process in (*ranks, *services):
            process.terminate()
        for process in (*ranks, *services):
            process.wait(10.0)


def _service(services: list[subprocess.Popen[str]], module: str, *arguments: str) -> str:
    """Start a service and return its URL."""
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True)
    services.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = _READY.search(line)
    if found is None:
        raise RuntimeError(f"{module} did not start: {line}")
    return found[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
