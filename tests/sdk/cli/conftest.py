"""A job to look at, and what a gateway may say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import overview as made_up
from support.command import Double, Job
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
    made.answers["/v1/diagnosis"] = {"problems": []}
    yield made
    made.close()


@pytest.fixture
def overview() -> Callable[..., dict[str, Any]]:
    """Makes the overview of a job of two ranks, with some of it changed."""

    def make(**changes: Any) -> dict[str, Any]:
        rates = {"operations": 12.34, "bytes": 2.5e6}
        seqs = {"seqs": {"0": 42, "1": 41}, "operations_rate": 12.34, "bytes_rate": 2.5e6}
        return {
            "time": 1e9,
            "gateway": {"id": "g", "version": "0.1.0", "uptime": 61.0},
            "ranks": [made_up.rank(rank, job="train-1", host=f"host-{rank}") for rank in range(2)],
            "agents": [made_up.agent("agent-7")],
            "groups": [made_up.group(ranks=2, job="train-1", **seqs)],
            "inflight": [made_up.inflight(2.5, arrived=[0], missing=[1], job="train-1")],
            "rates": rates,
            "store": [],
            "problems": [],
            **changes,
        }

    return make
