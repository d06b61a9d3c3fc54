"""``rankmesh stragglers`` and ``dist.straggler_report()``: the slow rank of a job."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support import hosting
from support.command import here
from support.me import Me
from support.processes import Ranks, wait_until
from support.relay import relayed

import rankmesh as dist
from rankmesh_agent.transports.tcp import TcpListener, TcpTransport


def be_slow(me: Me) -> None:
    """Be a rank of a job whose rank 1 sleeps in each step."""
    dist.init_process_group()
    data = np.ones(1000, np.float32)
    over = dist.get_default_store()
    while not over.check(["over"]):
        if dist.get_rank() == 1:
            time.sleep(0.1)
        stop = np.array([over.check(["over"])], np.int32)
        dist.all_reduce(data)
        if dist.get_rank() == 0 and over.check(["ask"]):
            over.delete_key("ask")
            found = [(each.job, each.ranks, each.lost > 0.3) for each in dist.straggler_report(5.0)]
            over.set("report", repr(found))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop[0]:
            break


@pytest.mark.processes
def test_the_slow_rank_of_a_job(ranks: Ranks):
    gateway = hosting.cluster({}, 0, "gateway").url
    place = {"RANKMESH_GATEWAY": gateway, "RANKMESH_HOSTING": "embedded", "WORLD_SIZE": "3"}
    started = ranks.start(be_slow, 3, env=lambda rank: {**place, "RANK": str(rank)})

    def command(*arguments: str) -> Any:
        return here(*arguments, "--job", ranks.job, RANKMESH_GATEWAY=gateway)

    def look() -> Any:
        done = command("stragglers", "--seconds", "5", "--json", "--patience", "20")
        return next((each for each in done.document if each["ranks"] == [1] and "core" in each["why"]), None)

    try:
        found = wait_until(look, "rank 1 to be found", 60.0)
        done = command("stragglers", "--patience", "20")
        command("store", "set", "ask", "yes")
        report = command("store", "get", "report", "--timeout", "60").stdout
    finally:
        command("store", "set", "over", "yes")
        ranks.wait(started)
    assert found["lost"] > 0.3
    assert found["late"] == pytest.approx(0.1, rel=0.5)
    assert found["place"].startswith("test_stragglers.py:")
    assert found["why"].startswith("waits, for data perhaps, and does not compute (")
    assert done.code == 1
    assert "rank 1 makes the others wait " in done.stdout
    assert report.strip() == repr([(ranks.job, [1], True)])


def be_reached_through_a_relay(me: Me, slow: int) -> None:
    """Be a rank of a job over TCP; the ranks above ``slow`` connect to it through the test's relay."""
    listen = TcpTransport.listen

    def behind_relay(self: TcpTransport, host: str) -> TcpListener:
        listener = listen(self, host)
        (me.folder / "port").write_text(listener.address.rpartition(":")[2])
        me.mark("listens")
        me.wait_for("relayed")
        listener.address = f"{host}:{(me.folder / 'port').read_text()}"
        return listener

    if me.rank == slow:
        TcpTransport.listen = behind_relay  # type: ignore[method-assign]
    dist.init_process_group()
    over, data, stop = dist.get_default_store(), np.ones(1000, np.float32), np.zeros(1, np.int32)
    while not stop[0]:
        time.sleep(0.02)
        dist.all_reduce(data)
        stop[0] = over.check(["over"])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)


@pytest.mark.processes
@pytest.mark.parametrize(("slow", "named"), [(0, [0]), (1, [1, 2])], ids=["all links of a rank", "one link"])
def test_a_slow_link_of_a_job(ranks: Ranks, slow: int, named: list[int]):
    gateway = hosting.cluster({}, 0, "gateway").url
    place = {"RANKMESH_GATEWAY": gateway, "RANKMESH_HOSTING": "embedded", "RANKMESH_TRANSPORT": "tcp"}
    started = ranks.start(
        be_reached_through_a_relay, 3, env=lambda rank: {**place, "WORLD_SIZE": "3", "RANK": str(rank)}, slow=slow
    )
    wait_until((ranks.folder / "listens").exists, "the rank to listen")
    with relayed("127.0.0.1", int((ranks.folder / "port").read_text())) as relay:
        relay.delay = 0.02
        (ranks.folder / "port").write_text(str(relay.port))
        (ranks.folder / "relayed").touch()

        def look() -> Any:
            arguments = "stragglers", "--job", ranks.job, "--json", "--seconds", "5", "--patience", "20"
            found = here(*arguments, RANKMESH_GATEWAY=gateway).document or []
            return [each["ranks"] for each in found if "slow network" in each["why"]]

        try:
            assert wait_until(look, "the link to be found", 60.0) == [named]
        finally:
            here("store", "set", "over", "yes", "--job", ranks.job, RANKMESH_GATEWAY=gateway)
            ranks.wait(started)


def test_a_report_needs_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        dist.straggler_report()
    with pytest.raises(ValueError, match="at least"):
        dist.straggler_report(0.0)
