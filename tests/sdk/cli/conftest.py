"""A job to look at, and what a gateway may say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.command import Double, Job, member
from support.processes import Ranks


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    ranks = Ranks(tmp_path_factory.mktemp("job"))
    try:
        job = Job(ranks, "a secret")
        yield job
        job.end()
    finally:
        ranks.end()


@pytest.fixture
def double() -> Iterator[Double]:
    made = Double()
    yield made
    made.close()


@pytest.fixture
def overview() -> Callable[..., dict[str, Any]]:
    """What a gateway sees of a job of two ranks, with some of it changed."""

    def make(**changes: Any) -> dict[str, Any]:
        ranks = [
            {"job": "train-1", "epoch": 1, "state": "alive", "heartbeat_age": 0.3, "reason": "", "member": member(rank)}
            for rank in range(2)
        ]
        agent = {"id": "a", "name": "agent-7", "host": "host7", "host_id": "h", "pid": 7, "leases": []}
        group = {"job": "train-1", "epoch": 1, "id": "00000000000000aa", "name": "world", "ranks": [0, 1]}
        call = {"job": "train-1", "epoch": 1, "group": group["id"], "name": "world", "seq": 41, "age": 2.5}
        return {
            "time": 1e9,
            "gateway": {"id": "g", "version": "0.1.0", "uptime": 61.0},
            "ranks": ranks,
            "agents": [{"state": "free", "heartbeat_age": 0.1, "agent": {**agent, "urls": ["http://10.0.0.7:8701"]}}],
            "groups": [
                {**group, "medium": "shm", "seqs": {"0": 42, "1": 41}, "failure": "", "operations_rate": 12.34,
                 "bytes_rate": 2.5e6}
            ],
            "inflight": [{**call, "op": "all_reduce(sum, float32 x 10)", "bytes": 40, "arrived": [0], "missing": [1]}],
            "rates": {"operations": 12.34, "bytes": 2.5e6},
            "store": [],
            **changes,
        }  # fmt: skip

    return make
