"""Several ranks on several hosts: bytes between the hosts and times, with shared memory inside them and without.

    sudo python -m benchmarks.hosts                     two hosts of two ranks, 64 MiB
    sudo python -m benchmarks.hosts --gbit 2            with network cards of 2 Gbit/s
    sudo python -m benchmarks.hosts --ranks 4 2 1 --collective broadcast

The hosts are network namespaces of this machine, joined by a bridge, which takes root and iproute2. Each has its own
addresses and network card, whose counters are read, and its own directory for shared memory. They, and all processes,
are gone at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WAYS = {"shared memory inside hosts": {}, "TCP only": {"RANKMESH_TRANSPORT": "tcp"}}
"""What is compared, and the variables that choose it."""
_SECONDS = 120.0
"""How long one job may take."""
_CARD = "eth0"
_COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")


class Host(NamedTuple):
    """A test host.

    Attributes:
        namespace: its network namespace.
        address: its address.
        shm: its directory for shared memory.
    """

    namespace: str
    address: str
    shm: Path


@contextlib.contextmanager
def made(count: int, gbit: float | None) -> Iterator[list[Host]]:
    """Test hosts that reach each other and nothing else, until the block ends.

    Args:
        count: how many.
        gbit: limit of each network card in Gbit/s, None for none.
    """
    prefix = f"rankmesh-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts: list[Host] = []
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number in range(count):
            host = Host(f"{prefix}-{number}", f"10.99.0.{10 + number}", Path(f"/dev/shm/{prefix}-{number}"))
            hosts.append(host)
            host.shm.mkdir()
            _ip("netns", "add", host.namespace)
            card = ("peer", "name", _CARD, "netns", host.namespace)
            _ip("link", "add", f"p{number}", "netns", switch, "type", "veth", *card)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", _CARD)
            for name in ("lo", _CARD):
                _ip("-n", host.namespace, "link", "set", name, "up")
            _ip("-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
            if gbit is not None:
                limit = ("tbf", "rate", f"{gbit}gbit", "burst", "1mb", "latency", "50ms")
                _run("tc", "-n", host.namespace, "qdisc", "add", "dev", _CARD, "root", *limit)
        yield hosts
    finally:
        for name in [*(host.namespace for host in hosts), switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for host in hosts:
            shutil.rmtree(host.shm, ignore_errors=True)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def job(hosts: Sequence[Host], options: argparse.Namespace, variables: dict[str, str]) -> list[dict[str, Any]]:
    """Run one job; return what each rank says.

    Args:
        hosts: where its ranks run, in order.
        options: of the command line.
        variables: for the environment of all ranks.
    """
    places = [host for host, ranks in zip(hosts, options.ranks, strict=True) for _ in range(ranks)]
    token = secrets.token_hex(8)
    ranks: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank, host in enumerate(places):
                own = {"RANKMESH_TOKEN": token, "RANKMESH_BIND": host.address, "RANKMESH_SHM_DIR": str(host.shm)}
                arguments = [options.collective, options.mib, options.repeat, rank, len(places), folder]
                command = [sys.executable, "-m", "benchmarks.hosts", "--as-rank", *map(str, arguments)]
                ranks.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", host.namespace, *command],
                        env={**os.environ, "OMP_NUM_THREADS": "1", **variables, **own},
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            end = time.monotonic() + _SECONDS
            said = [rank.communicate(timeout=max(0.1, end - time.monotonic()))[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the ranks were not done after {_SECONDS:g} s") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed; what it wrote is above")
    return [json.loads(text) for text in said]


def as_rank(collective: str, mib: str, repeat: str, rank: str, size: str, folder: str) -> None:
    """Be a rank: make the calls, say how long each took and what the network card of this host counted for all."""
    import rankmesh as dist

    dist.init_process_group(init_method=f"file://{folder}/rendezvous", rank=int(rank), world_size=int(size))
    count = int(mib) * (1 << 20) // 4 // int(size) * int(size)
    array = np.ones(count, np.float32)
    split = np.split(array, int(size))
    outputs, output = [np.empty_like(part) for part in split], np.empty_like(split[0])
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(array),
        "reduce": lambda: dist.reduce(array, 0),
        "broadcast": lambda: dist.broadcast(array, 0),
        "all_gather": lambda: dist.all_gather(outputs, split[int(rank)]),
        "reduce_scatter": lambda: dist.reduce_scatter(output, split),
    }
    call = calls[collective]
    call()
    dist.barrier()
    before = _sent()
    seconds = []
    for _ in range(int(repeat)):
        array[:] = 1
        dist.barrier()
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    print(json.dumps({"seconds": seconds, "sent": (_sent() - before) / int(repeat)}))
    dist.destroy_process_group()


def _sent() -> int:
    """Return the bytes that this host's network card has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == _CARD:
            return int(numbers.split()[8])
    raise SystemExit(f"this host has no {_CARD}")


def main() -> None:
    """Compare the ways, in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 2], help="ranks of each host")
    parser.add_argument("--mib", type=int, default=64, help="MiB of a rank's float32 array, or of all outputs together")
    parser.add_argument("--collective", choices=_COLLECTIVES, default="all_reduce")
    parser.add_argument("--gbit", type=float, help="limit of each host's network card in Gbit/s")
    parser.add_argument("--repeat", type=int, default=5, help="calls of a job")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each way, in turn")
    options = parser.parse_args()
    if os.geteuid() or not shutil.which("ip"):
        raise SystemExit("this makes network namespaces: run it as root, with iproute2 installed")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    sent: dict[str, list[float]] = {way: [] for way in WAYS}
    with made(len(options.ranks), options.gbit) as hosts:
        for _ in range(options.rounds):
            for way, variables in WAYS.items():
                said = job(hosts, options, variables)
                seconds[way] += [max(times) for times in zip(*(rank["seconds"] for rank in said), strict=True)]
                firsts = [sum(options.ranks[:number]) for number in range(len(hosts))]
                sent[way].append(max(said[first]["sent"] for first in firsts))
    ranks, nbytes = sum(options.ranks), options.mib * (1 << 20)
    print(
        f"{options.collective} of {options.mib} MiB, {' + '.join(map(str, options.ranks))} ranks on {len(hosts)} hosts"
    )
    print(f"{'':28}  {'ms a call':>9}  {'(lowest - highest)':>20}  {'MB sent by a host, at most':>26}")
    for way, times in seconds.items():
        spread = f"({min(times) * 1e3:.0f} - {max(times) * 1e3:.0f})"
        print(
            f"{way:28}  {statistics.median(times) * 1e3:9.0f}  {spread:>20}  {statistics.median(sent[way]) / 1e6:26.1f}"
        )
    if options.collective == "all_reduce":
        ring = 2 * (ranks - 1) / ranks * nbytes / 1e6
        print(f"a flat ring would send 2 (ranks - 1) / ranks of the array: {ring:.1f} MB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(*sys.argv[2:])
    else:
        main()
