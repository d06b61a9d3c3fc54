"""Test hosts: network namespaces with an address, a network card and a directory for shared memory each.

As a program, a launcher of ranks on two of them: ``python tests/support/network_hosts.py RANKS ...``; what follows
RANKS are the arguments of Python for each rank. It needs root and iproute2. Hosts and processes are gone at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_CARD = "eth0"
_LIFETIME = 3600
_numbers = itertools.count()


class Host(NamedTuple):
    """A test host: its network namespace, its address, its directory for shared memory, and its port of the switch."""

    namespace: str
    address: str
    shm: Path
    switch: str
    port: str

    def cut(self) -> None:
        """Take its cable out: nothing that it sends arrives, nor anything that is sent to it."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")


@contextlib.contextmanager
def network_hosts(count: int, gbit: float | None = None) -> Iterator[list[Host]]:
    """Test hosts that reach each other and nothing else, with network cards limited to ``gbit`` Gbit/s."""
    prefix = f"rankmesh-{os.getpid()}-{next(_numbers)}"
    switch = f"{prefix}-switch"
    made: list[Host] = []
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for number in range(count):
            host = Host(
                f"{prefix}-{number}",
                f"10.99.0.{10 + number}",
                Path(f"/dev/shm/{prefix}-{number}"),
                switch,
                f"p{number}",
            )
            made.append(host)
            host.shm.mkdir()
            _run("ip", "netns", "add", host.namespace)
            card = ("peer", "name", _CARD, "netns", host.namespace)
            _run("ip", "link", "add", f"p{number}", "netns", switch, "type", "veth", *card)
            _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", _CARD)
            for name in ("lo", _CARD):
                _run("ip", "-n", host.namespace, "link", "set", name, "up")
            _run("ip", "-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
            if gbit is not None:
                limit = ("tbf", "rate", f"{gbit}gbit", "burst", "1mb", "latency", "50ms")
                _run("tc", "-n", host.namespace, "qdisc", "add", "dev", _CARD, "root", *limit)
        yield made
    finally:
        for name in [*(host.namespace for host in made), switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for host in made:
            shutil.rmtree(host.shm, ignore_errors=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def main(arguments: Sequence[str]) -> int:
    """Run the ranks, half of them on each host; return 1 if one of them failed."""
    size, *program = arguments
    if os.geteuid() or not shutil.which("ip"):
        raise SystemExit("this makes network namespaces: run it as root, with iproute2 installed")
    gbit = os.environ.get("BENCHMARK_GBIT")
    ranks: list[subprocess.Popen[bytes]] = []
    with network_hosts(2, float(gbit) if gbit else None) as (first, second):
        place = {"MASTER_ADDR": first.address, "MASTER_PORT": "29400", "WORLD_SIZE": size}
        place["RANKMESH_TOKEN"] = secrets.token_hex(8)
        try:
            for number in range(int(size)):
                host = first if number < int(size) / 2 else second
                own = {"RANK": str(number), "RANKMESH_BIND": host.address, "RANKMESH_SHM_DIR": str(host.shm)}
                command = ["ip", "netns", "exec", host.namespace, sys.executable, *program]
                ranks.append(subprocess.Popen(command, env={**os.environ, **place, **own}))
            return int(any(code != 0 for code in [rank.wait(_LIFETIME) for rank in ranks]))
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
