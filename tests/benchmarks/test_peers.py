"""How the peers are started, and what happens when one is not installed."""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks.peers import PEERS, Peer, available

RANKMESH = PEERS["rankmesh-shm"]


def test_command_says_how_many_ranks() -> None:
    peer = Peer("p", "P", "P", "rankmesh", "json", ("start", "-n{ranks}", "--"))
    assert peer.command(3, "-m", "program") == ["start", "-n3", "--", "-m", "program"]


def test_an_installed_peer_misses_nothing() -> None:
    assert Peer("p", "P", "P", "rankmesh", "json", (sys.executable,)).missing() is None


def test_a_missing_peer_is_left_out_with_a_line_saying_so() -> None:
    no_package = replace(RANKMESH, title="Alpha", module="not_a_package")
    no_program = replace(RANKMESH, title="Beta", launcher=("not-a-program", "-n", "{ranks}"))
    assert available((RANKMESH, no_package, no_program)) == (
        [RANKMESH],
        [
            "Alpha is left out: the Python package not_a_package is not installed.",
            "Beta is left out: the program not-a-program is not installed.",
        ],
    )
