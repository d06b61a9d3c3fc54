"""Joins that fail: the error says who and what, in time, and nothing is left that a next attempt could stumble over."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections import Counter

import numpy as np
import pytest
from support.processes import Me, Ranks, free_port, plain_http_server, wait_until

import rankmesh as dist

pytestmark = pytest.mark.processes

SOON = 30.0
"""Seconds within which an error must come, on a busy machine too; a join that is refused might have taken 60."""


def fail_then_work(me: Me, failing: dict, working: dict, together: bool = False) -> None:
    """Join in vain, check that nothing is left of it, then (when all have failed) join properly; say the error."""
    before = me.resources()
    failure = me.attempt(dist.init_process_group, **failing)
    after = me.resources()
    me.report(**failure)
    assert failure["error"] is not None
    assert not dist.is_initialized()
    assert after == before, f"{before} became {after}"
    if together:
        me.meet("failed")
    work(me, working)


def work(me: Me, options: dict) -> None:
    """Join properly, compute something, leave."""
    dist.init_process_group(**options, timeout=60)
    value = np.array([1.0])
    dist.all_reduce(value)
    assert value == dist.get_world_size()
    dist.destroy_process_group()


# Ranks that are missing


def host_once(me: Me) -> None:
    """Host a gateway, for which a process imports much the first time: it would take a part of the join's time."""
    dist.init_process_group(init_method=f"file://{me.folder}/alone-{me.rank}", rank=0, world_size=1)
    dist.destroy_process_group()


def listens(port: int) -> bool:
    """Whether somebody accepts connections at a port of this machine."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def two_of_four(me: Me, method: str) -> None:
    host_once(me)
    me.meet("started")
    if me.rank == 1 and method.startswith("tcp:"):  # at a file, the first to come hosts it
        wait_until(lambda: listens(int(method.rpartition(":")[2])), "rank 0's gateway")
    failing = {"init_method": method, "rank": (0, 2)[me.rank], "world_size": 4, "timeout": 5}
    fail_then_work(me, failing, {"init_method": method, "rank": me.rank, "world_size": 2}, together=True)


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_a_join_that_times_out_names_the_missing_ranks(ranks: Ranks, scheme: str) -> None:
    method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{ranks.folder}/meet"
    started = ranks.run(two_of_four, 2, method=method)
    for rank in started:
        reported = rank.reported
        assert reported["error"] == "JoinTimeoutError", (
            "also when the other gave up a moment earlier, and its gateway too"
        )
        assert "TimeoutError" in reported["is"]
        assert reported["ranks"] == [1, 3]
        assert "1, 3" in reported["text"]
        assert all(f"pid {each.pid}" in reported["text"] for each in started), "who did join is named, too"
        assert reported["seconds"] < SOON, reported


def none_of_three(me: Me, method: str) -> None:
    host_once(me)
    failing = {"init_method": method, "world_size": 3, "timeout": 4}
    fail_then_work(me, failing, {"init_method": method, "world_size": 1})


def test_a_join_without_ranks_that_times_out_says_how_many_are_missing(ranks: Ranks) -> None:
    method = f"file://{ranks.folder}/meet"
    (process,) = ranks.run(none_of_three, 1, method=method)
    reported = process.reported
    assert reported["error"] == "JoinTimeoutError"
    assert reported["ranks"] == [], "nobody knows which ones they would have been"
    assert "2 more" in reported["text"]
    assert f"without a rank yet ({socket.gethostname()}, pid {process.pid})" in reported["text"]


def one_too_many(me: Me, method: str) -> None:
    """Two processes without ranks run; the third is refused, and they go on."""
    if me.rank == 2:
        me.wait_for("up-0", "up-1")
        me.report(**me.attempt(dist.init_process_group, init_method=method, world_size=2, timeout=60))
        me.mark("refused")
        return
    dist.init_process_group(init_method=method, world_size=2)
    me.mark(f"up-{me.rank}")
    me.wait_for("refused")
    dist.barrier()
    dist.destroy_process_group()


def test_one_process_more_than_there_are_ranks(ranks: Ranks) -> None:
    started = ranks.run(one_too_many, 3, method=f"tcp://127.0.0.1:{free_port()}")
    reported = started[2].reported
    assert reported["error"] == "RankTakenError"
    assert f"none left for process {started[2].pid}" in reported["text"]
    assert reported["seconds"] < SOON


def alone_for_a_while(me: Me, gateway: str) -> None:
    options = {"init_method": gateway, "rank": me.rank, "world_size": 2}
    if me.rank == 1:
        failure = me.attempt(dist.init_process_group, **options, timeout=4)  # the gateway may be slow to answer
        me.report(**failure)
        me.mark("failed")
    else:
        me.wait_for("failed")
    work(me, options)


def test_a_rank_that_gave_up_can_join_again_at_the_same_gateway(ranks: Ranks, gateway: str) -> None:
    started = ranks.run(alone_for_a_while, 2, gateway=gateway)
    assert started[1].reported["error"] == "JoinTimeoutError"
    assert started[1].reported["ranks"] == [0]


# Ranks that do not agree


def other_token(me: Me, method: str) -> None:
    options = {"init_method": method, "rank": me.rank, "world_size": 2}
    os.environ["RANKMESH_TOKEN"] = "right"
    if me.rank == 0:
        work(me, options)
        return
    me.wait_for("up")
    os.environ["RANKMESH_TOKEN"] = "wrong"
    before = me.resources()
    me.report(**me.attempt(dist.init_process_group, **options, timeout=60))
    assert me.resources() == before
    os.environ["RANKMESH_TOKEN"] = "right"
    work(me, options)


def test_the_wrong_token(ranks: Ranks) -> None:
    ranks.mark("up")
    started = ranks.start(other_token, 2, method=f"tcp://127.0.0.1:{free_port()}")
    ranks.wait(started)
    assert [rank.code for rank in started] == [0, 0], ranks.transcript()
    assert "has another token than this service" in started[0].stderr
    assert started[1].complaints == ""
    reported = started[1].reported
    assert reported["error"] == "AuthenticationError"
    assert "RANKMESH_TOKEN" in reported["text"]
    assert reported["seconds"] < SOON


def with_settings(me: Me, method: str, variable: str, values: list[str]) -> None:
    os.environ[variable] = values[me.rank]
    me.report(**me.attempt(dist.init_process_group, init_method=method, rank=me.rank, world_size=2, timeout=30))


def test_settings_that_differ_are_named_on_every_rank(ranks: Ranks) -> None:
    variable, values = "RANKMESH_TRANSPORT", ["tcp", "shm"]
    method = f"tcp://127.0.0.1:{free_port()}"
    for started in ranks.run(with_settings, 2, method=method, variable=variable, values=values):
        assert started.reported["error"] == "DistNetworkError"
        assert re.search(
            rf"{variable} differs .*: {values[0]} on rank 0 .*; {values[1]} on rank 1 ", started.reported["text"]
        )
        assert started.reported["seconds"] < SOON


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


# Ctrl-C


def impatient(me: Me, waits: list) -> None:
    for method, rank in waits:
        before = [Counter(each) for each in me.resources()]
        me.interrupt_when_waiting()
        failure = me.attempt(dist.init_process_group, init_method=method, rank=rank, world_size=2)
        assert failure["error"] == "KeyboardInterrupt", failure
        assert failure["seconds"] < SOON

        def has_ended(before: list[Counter] = before) -> bool:  # those before may include one that was about to end
            return all(Counter(now) <= then for now, then in zip(me.resources(), before, strict=True))

        with contextlib.suppress(AssertionError):
            wait_until(has_ended, "all threads of the join to end", 60.0)
        assert has_ended(), f"{before} became {me.resources()}"
        work(me, {"init_method": method, "rank": 0, "world_size": 1})


def test_ctrl_c_ends_a_join(ranks: Ranks) -> None:
    """A join that waits for others, and one that waits for an answer in the multicast group."""
    waits = [(f"tcp://{host}:{free_port()}", rank) for host, rank in (("127.0.0.1", 0), ("239.255.41.7", 1))]
    ranks.run(impatient, 1, env={"RANKMESH_BIND": "127.0.0.1"}, waits=waits)


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
