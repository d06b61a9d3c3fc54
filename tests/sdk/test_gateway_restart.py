"""A gateway that is killed and started again: jobs go on, a join that waits is taken up, the events are there."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
import urllib.request

import numpy as np
import pytest
from support.gateway_process import GatewayProcess
from support.me import wait_until
from support.processes import DEADLINE, Me, Ranks
from support.state_file import saved

import rankmesh as dist

pytestmark = pytest.mark.processes
ALL_ALIVE = dict.fromkeys(range(3), "alive")
SLOWNESS = ("rank-suspect", "rank-alive")
"""Events of a rank that has sent no heartbeat for a while, as on a busy machine, and does so again."""


class Gateway(GatewayProcess):
    """A gateway as a process, with a state file."""

    def states(self, job: str) -> dict[int, str]:
        return {info["member"]["rank"]: info["state"] for info in self.ask(f"/v1/ranks?job={job}")}

    def has_made_a_group(self) -> bool:
        """Whether its state file has a world whose ranks have made their group: all of them have their join's reply."""
        return bool(saved(self.state, "SELECT count(*) FROM event WHERE kind = 'group-made'"))

    def events(self, count: int) -> list[tuple[str, str]]:
        """The kind and the job of the first events that it has, without those of ranks that were slow for a while."""
        request = urllib.request.Request(f"{self.url}/v1/events", headers={"Last-Event-ID": "1"})
        found: list[tuple[str, str]] = []
        kind = ""
        with urllib.request.urlopen(request, timeout=20) as stream:
            for line in stream:
                if line.startswith(b"event: "):
                    kind = line[7:].strip().decode()
                elif line.startswith(b"data: {") and kind not in SLOWNESS:
                    found.append((kind, json.loads(line[6:])["job"]))
                    if len(found) == count:
                        break
        return found


def init(me: Me, port: int, job: str) -> None:
    method = f"http://127.0.0.1:{port}"
    dist.init_process_group(init_method=method, rank=me.rank, world_size=me.size, group_name=job, timeout=60)


def train(me: Me, port: int) -> None:
    init(me, port, "trains")
    steps, over = 0, np.zeros(1, np.int64)
    while not over[0]:
        gradient = np.full(10, steps)
        dist.all_reduce(gradient)
        assert (gradient == me.size * steps).all()
        steps += 1
        over[0] = (me.folder / "enough").exists()
        dist.broadcast(over, 0)
        time.sleep(0.01)
    me.report(steps=steps)
    dist.destroy_process_group()


def join(me: Me, port: int) -> None:
    init(me, port, "joins")
    value = np.full(10, 1)
    dist.all_reduce(value)
    assert (value == 2).all()
    dist.destroy_process_group()


def test_killed_in_mid_training_and_in_mid_join(ranks: Ranks) -> None:
    gateway = Gateway(ranks)
    trains = ranks.start(train, 3, port=gateway.port)
    wait_until(lambda: gateway.states("trains") == ALL_ALIVE, "the world")
    joins = ranks.start(join, 2, ranks=[0], port=gateway.port)
    wait_until(lambda: gateway.states("joins") == {0: "joining"}, "the first join")
    wait_until(gateway.has_made_a_group, "the group")
    gateway.end(signal.SIGKILL)

    gateway.start()
    states = gateway.states("trains")  # before they have reported again
    assert states.keys() == ALL_ALIVE.keys()
    assert {*states.values()} <= {"alive", "suspect"}, states
    wait_until(lambda: gateway.ask("/v1/groups?job=trains"), "the report of the group")
    assert [group["name"] for group in gateway.ask("/v1/groups?job=trains")] == ["world"]
    trained = [*[("rank-joining", "trains")] * 3, ("world-complete", "trains"), ("group-made", "trains")]
    assert sorted(gateway.events(6)) == sorted([*trained, ("rank-joining", "joins")])
    joins += ranks.start(join, 2, ranks=[1], port=gateway.port)
    ranks.succeed(joins)
    steps = gateway.ask("/v1/groups?job=trains")[0]["seqs"]
    wait_until(lambda: gateway.ask("/v1/groups?job=trains")[0]["seqs"] != steps, "more steps")
    (ranks.folder / "enough").touch()
    ranks.succeed(trains)
    assert len({rank.reported["steps"] for rank in trains}) == 1
    wait_until(lambda: set(gateway.states("trains").values()) == {"left"}, "the goodbyes")
    gateway.end(signal.SIGTERM)
    assert gateway.process.code == 0
    logged = [line for line in gateway.process.stderr.splitlines() if not any(kind in line for kind in SLOWNESS)]
    assert not re.search("WARNING|ERROR|Traceback", "\n".join(logged)), gateway.process.stderr


def test_a_rank_that_dies_while_there_is_no_gateway(ranks: Ranks) -> None:
    gateway = Gateway(ranks)
    trains = ranks.start(train, 3, port=gateway.port)
    wait_until(gateway.has_made_a_group, "the group")
    gateway.end(signal.SIGKILL)
    trains[2].kill()
    ranks.wait(trains)
    assert all("RankFailedError" in rank.stderr for rank in trains[:2]), ranks.transcript()
    gateway.start()
    wait_until(lambda: set(gateway.states("trains").values()) == {"failed"}, "the failures", DEADLINE)
    gateway.end(signal.SIGTERM)


def test_one_state_file_is_for_one_gateway(ranks: Ranks) -> None:
    gateway = Gateway(ranks)
    command = [sys.executable, "-m", "rankmesh_gateway", "--port=0", f"--state={gateway.state}"]
    second = ranks.launch(command, name="second")
    ranks.wait([second])
    assert second.code == 2
    assert second.stderr.startswith("python -m rankmesh_gateway: cannot use the state file")
    assert "another gateway uses it; give each gateway its own" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    gateway.end(signal.SIGTERM)
