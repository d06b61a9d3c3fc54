"""Joins that wait: what they say meanwhile, and Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support import hosting
from support.processes import Rank, Ranks, free_port, wait_until

pytestmark = pytest.mark.processes

JOIN = """\
import os, signal
from rankmesh_agent.membership import missing
missing.REPORT_SECONDS = missing.GATEWAY_SECONDS = 0.1
report = missing.MissingRanks.gateway_missing

def mark(*arguments):
    open(f"waits.{os.environ['RANK']}", "w")
    report(*arguments)

missing.MissingRanks.gateway_missing = mark
signal.signal(signal.SIGINT, signal.default_int_handler)
import rankmesh as dist
dist.init_process_group(timeout=300)
"""
LAUNCH = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from rankmesh.launch import main
sys.exit(main(sys.argv[1:]))
"""


def script(ranks: Ranks, name: str, text: str) -> str:
    path = Path(ranks.folder, name)
    path.write_text(text)
    return str(path)


def until_said(rank: Rank, text: str) -> None:
    wait_until(lambda: text in rank.stderr, f"{text!r} in {rank.stderr}")


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_waits_for_the_other_and_is_interrupted(ranks: Ranks, node: int):
    port = free_port()
    launcher = ranks.command(
        script(ranks, "launch.py", LAUNCH),
        *("--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", f"--master-port={port}"),
        script(ranks, "join.py", JOIN),
        name="launcher",
        RANKMESH_TOKEN="secret",
    )
    said = f"still waits for the gateway at http://127.0.0.1:{port}: " if node else "is here, ranks 2-3 are missing"
    until_said(launcher, said)
    if node == 1:
        ranks.wait_for("waits.2", "waits.3")
    else:
        until_said(launcher, "ranks 0-1) is here, ranks 2-3 are missing (node 1)")
        assert "[rank 0] waiting for 1 of 2 nodes: node 0 (" in launcher.stderr
    launcher.kill(signal.SIGINT)
    ranks.wait([launcher])
    assert launcher.code == 128 + signal.SIGINT, launcher
    lines = launcher.stderr.splitlines()
    reporters = {line[:8] for line in lines if "ranks 0-1) is here" in line or "still waits" in line}
    assert reporters == {f"[rank {2 * node}]"}, "one rank a node"
    assert [line for line in lines if "waiting for" not in line and "still waits" not in line] == [
        lines[0],
        "[rankmesh] SIGINT passed on to the ranks; they get 30 s to end, a second Ctrl-C kills them at once",
    ]


def test_a_rank_that_waits_for_others_and_is_interrupted(ranks: Ranks):
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rank = ranks.command(script(ranks, "join.py", JOIN), name="rank", **place)
    until_said(rank, "waiting for 2 of 3 ranks: ")
    assert "(rank 0) is here, ranks 1-2 are missing" in rank.stderr
    rank.kill(signal.SIGINT)
    ranks.wait([rank])
    assert rank.code == -signal.SIGINT, rank
    waited, last = rank.stderr.split("Traceback")[0].splitlines(), rank.stderr.splitlines()[-1]
    said = ("waiting for 2 of 3 ranks: ", "still waits for the gateway")  # which has no core for seconds, perhaps
    assert all(line.startswith(said[0]) or said[1] in line for line in waited)
    assert last.startswith("KeyboardInterrupt: interrupted after ")


def test_an_interrupt_that_is_caught_and_another_error(ranks: Ranks):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    text = (
        JOIN.replace("dist.init", "try:\n    dist.init") + "except KeyboardInterrupt:\n    raise ValueError('gone')\n"
    )
    rank = ranks.command(script(ranks, "join.py", text), name="rank", **place)
    until_said(rank, "waiting for 1 of 2 ranks: ")
    rank.kill(signal.SIGINT)
    ranks.wait([rank])
    assert rank.code == 1
    assert rank.stderr.count("Traceback") == 2, rank
    assert rank.stderr.endswith("ValueError: gone\n")


def test_a_process_that_attaches_to_an_agent(ranks: Ranks):
    """Its agent, in another process, joins for it."""
    url = hosting.cluster({}, 1, "waiting").url
    place = {"RANK": "0", "WORLD_SIZE": "2"}
    text = JOIN.replace("init_process_group(", f"init_process_group(init_method='{url}?hosting=attached', ")
    rank = ranks.command(script(ranks, "join.py", text), name="rank", **place)
    until_said(rank, "waiting for 1 of 2 ranks: ")
    assert "(rank 0) is here, rank 1 is missing" in rank.stderr
    rank.kill(signal.SIGINT)
    ranks.wait([rank])
    assert rank.stderr.splitlines()[-1].startswith("KeyboardInterrupt: interrupted after ")
