"""Round trips to a store through RankMesh's TCPStore and torch's, in turns."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from statistics import median

from benchmarks.peers import Peer
from benchmarks.plan import Case, Cell
from benchmarks.results import Results
from benchmarks.run import Say, in_turn
from benchmarks.team import Team

OPERATIONS = ("store_set", "store_get", "store_add", "store_multi_get")
CROWD = ("store_crowd_fastest", "store_crowd_median", "store_crowd_slowest")
CLIENTS = 32
CALLS = 300
CROWD_SECONDS = 1.0

PEERS = (
    Peer(
        "rankmesh-store",
        "RankMesh's TCPStore",
        "RankMesh",
        "rankmesh-store",
        "rankmesh",
        (sys.executable,),
        program="benchmarks.store",
    ),
    Peer(
        "torch-store",
        "torch's TCPStore",
        "torch",
        "torch-store",
        "torch",
        (sys.executable,),
        program="benchmarks.store",
    ),
)


def measure(peers: list[Peer], rounds: int, results: Results, say: Say) -> None:
    """Measure what one client waits for each operation, and what each of many waits when all add at once.

    Args:
        peers: whose stores.
        rounds: how often each has its turn.
        results: what to add the figures to.
        say: takes a line of progress.

    Raises:
        PeerFailedError: a store did not start, or does not keep what it is given.
    """
    say(f"stores: starting {', '.join(peer.title for peer in peers)}, each with {CLIENTS} clients")
    with ExitStack() as stack:
        teams = [stack.enter_context(Team(peer, CLIENTS)) for peer in peers]
        results.versions.update({team.peer.name: team.version for team in teams})
        for number in range(rounds):
            for operation in OPERATIONS:
                for team in in_turn(teams, number):
                    seconds = team.measure(operation, 0, CALLS, repetitions=3)
                    results.add(Cell(Case(operation, 1, 0), team.peer.name), [1e6 * s for s in seconds], CALLS)
            for team in in_turn(teams, number):
                each = [1e6 * seconds[0] for seconds in team.ask("store_crowd", 0, CROWD_SECONDS, repetitions=1)]
                for operation, value in zip(CROWD, (min(each), median(each), max(each)), strict=True):
                    results.add(Cell(Case(operation, CLIENTS, 0), team.peer.name), [value])
