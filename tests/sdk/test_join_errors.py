"""Joins that fail for one process: the error says who and what, in time, and nothing is left of it.

support/meetings.py has what several processes do.
"""

from __future__ import annotations

import os
import re
import socket

import numpy as np
import pytest
from support.processes import Me, Ranks, free_port, plain_http_server

import rankmesh as dist

pytestmark = pytest.mark.processes

SOON = 30.0
"""Seconds within which an error must come, on a busy machine too; a join that is refused might have taken 60."""


def work(me: Me, options: dict) -> None:
    """Join properly, compute something, leave."""
    dist.init_process_group(**options, timeout=60)
    value = np.array([1.0])
    dist.all_reduce(value)
    assert value == dist.get_world_size()
    dist.destroy_process_group()


# One rank, and another process at its address, or none


def fail_and_work_in_turn(me: Me, cells: dict[str, dict]) -> None:
    """Join in vain and then properly, one cell after the other; say the errors by cell."""
    for name, cell in cells.items():
        os.environ["RANKMESH_BIND"] = cell["bind"]
        before = me.resources()
        for _ in range(3):
            failure = me.attempt(dist.init_process_group, **cell["failing"], world_size=2)
            if all(text in failure["text"] for text in cell["texts"]):
                break  # otherwise, it may have had no core for as long as it had to ask
        assert not dist.is_initialized()
        assert me.resources() == before, name
        me.report(**{name: failure})
        os.environ["RANKMESH_BIND"] = "127.0.0.1"
        work(me, {"init_method": cell["then"], "rank": 0, "world_size": 1})


def test_a_rank_that_cannot_join_says_why_in_time_and_can_join_then(ranks: Ranks) -> None:
    meet, group, nobody = f"file://{ranks.folder}/meet", f"tcp://239.255.41.7:{free_port()}", f"127.0.0.1:{free_port()}"
    with plain_http_server() as port, socket.create_server(("127.0.0.1", 0)) as listener:
        web, silent = f"127.0.0.1:{port}", f"127.0.0.1:{listener.getsockname()[1]}"
        in_use, no_gateway = "AddressInUseError", "GatewayUnreachableError"
        in_vain = (no_gateway, "JoinTimeoutError")
        ours, needed = f"pid {os.getpid()}", ["RANKMESH_TOKEN", "0.0.0.0"]
        table: dict[str, tuple[str, int, str, list[str]]] = {
            "nobody at the address": (f"http://{nobody}", 1, no_gateway, [nobody]),
            "nobody at the file": (meet, 1, "JoinTimeoutError", ["0"]),
            "nobody in the group": (group, 1, no_gateway, ["rank 0"]),
            "a silent listener": (f"tcp://{silent}", 1, no_gateway, [silent]),
            "a web server": (f"tcp://{web}", 1, "DistNetworkError", ["not a RankMesh gateway", web]),
            "a silent listener at rank 0's": (f"tcp://{silent}", 0, in_use, [silent, ours]),
            "a web server at rank 0's": (f"tcp://{web}", 0, in_use, [web, ours]),
            "no token": (f"tcp://{nobody}", 1, "ValueError", needed),
            "no token at rank 0": (f"tcp://{nobody}", 0, "ValueError", needed),
        }
        cells = {
            name: {
                "failing": {"init_method": method, "rank": rank, "timeout": 1 if error in in_vain else 60},
                "texts": texts,
                "then": method if method in (meet, group, f"tcp://{nobody}") else f"tcp://127.0.0.1:{free_port()}",
                "bind": "0.0.0.0" if texts is needed else "127.0.0.1",
            }
            for name, (method, rank, error, texts) in table.items()
        }
        (process,) = ranks.run(fail_and_work_in_turn, 1, cells=cells)
    for name, (_, _, error, texts) in table.items():
        reported = process.reported[name]
        assert error in reported["is"], (name, reported)
        assert all(text in reported["text"] for text in texts), (name, reported)
        assert reported["seconds"] < SOON, name
    assert "TimeoutError" in process.reported["nobody at the address"]["is"]
    assert nobody in process.reported["nobody at the address"]["address"]
    assert process.reported["a silent listener at rank 0's"]["address"] == silent
    assert process.reported["nobody at the file"]["ranks"] == [0]
    assert not (ranks.folder / "meet").exists()


# Arguments, which are looked at before anything is started


CLEAN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANKMESH_GATEWAY", "SLURM_PROCID", "SLURM_NTASKS")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name in CLEAN or name.startswith(("OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    return monkeypatch


WRONG = {
    "unknown method": ({"init_method": "udp://x:1", "rank": 0, "world_size": 1}, {}, "env://, tcp://host:port"),
    "no method": ({"init_method": "nonsense", "rank": 0, "world_size": 1}, {}, "env://, tcp://host:port"),
    "no port": ({"init_method": "tcp://127.0.0.1", "rank": 0, "world_size": 1}, {}, "tcp://127.0.0.1:29500"),
    "no host": ({"init_method": "tcp://:29500", "rank": 0, "world_size": 1}, {}, "needs a host and a port"),
    "bad port": ({"init_method": "tcp://127.0.0.1:99999", "rank": 0, "world_size": 1}, {}, "99999"),
    "relative path": ({"init_method": "file://meet", "rank": 0, "world_size": 1}, {}, "absolute path"),
    "no directory": ({"init_method": "file:///nowhere/meet", "rank": 0, "world_size": 1}, {}, "directory must exist"),
    "no rank": ({"world_size": 1}, {"MASTER_PORT": "1"}, "RANK"),
    "no rank, and every host's address": ({"init_method": "tcp://0.0.0.0:1", "world_size": 2}, {}, "which host"),
    "multicast without a token": ({"init_method": "tcp://239.1.1.1:1", "world_size": 2}, {}, "RANKMESH_TOKEN"),
    "no world size": ({"init_method": "tcp://127.0.0.1:1", "rank": 0}, {}, "WORLD_SIZE"),
    "no variables": ({}, {}, "RANK"),
    "no port variable": ({}, {"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_PORT"),
    "no address variable": ({}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR"),
    "rank too large": ({"init_method": "tcp://127.0.0.1:1", "rank": 2, "world_size": 2}, {}, "between 0 and"),
    "negative rank": ({"init_method": "tcp://127.0.0.1:1", "rank": -2, "world_size": 2}, {}, "between 0 and"),
    "negative rank of a left-out one": ({"init_method": "tcp://127.0.0.1:1?rank=-2", "world_size": 2}, {}, "between 0"),
    "world of none": ({"init_method": "tcp://127.0.0.1:1", "rank": 0, "world_size": 0}, {}, "at least 1"),
    "rank in words": ({}, {"RANK": "first", "WORLD_SIZE": "1"}, "RANK='first'"),
    "rank in words in the URL": ({"init_method": "tcp://127.0.0.1:1?rank=x&world_size=1"}, {}, "rank='x'"),
    "unknown backend": ({"backend": "carrier-pigeon"}, {}, "'mesh'"),
    "a store and a method": ({"store": object(), "init_method": "env://", "rank": 0, "world_size": 1}, {}, "not both"),
    "a store without a rank": ({"store": object(), "world_size": 1}, {"RANK": "0"}, "rank="),
    "a store without a world size": ({"store": object(), "rank": 0}, {"WORLD_SIZE": "1"}, "world_size="),
    "negative timeout": (
        {"init_method": "tcp://127.0.0.1:1", "rank": 0, "world_size": 1, "timeout": -1},
        {},
        "timeout",
    ),
}


@pytest.mark.parametrize(("options", "variables", "says"), WRONG.values(), ids=WRONG)
def test_what_makes_no_sense_is_refused_with_what_to_set(
    clean: pytest.MonkeyPatch, options: dict, variables: dict[str, str], says: str
) -> None:
    for name, value in variables.items():
        clean.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(says)):
        dist.init_process_group(**options)
    assert not dist.is_initialized()
