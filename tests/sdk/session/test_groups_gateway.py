"""Groups of a running job, made and ended by its gateway: ranks are processes that do something else meanwhile."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

import pytest
from support.processes import Me, Rank, Ranks, wait_until

import rankmesh as dist

pytestmark = pytest.mark.processes


class Gateway:
    """The gateway of a job, as somebody with curl asks it."""

    def __init__(self, url: str, job: str) -> None:
        self._url = url
        self.job = job

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/v1/{path}", timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, **document: Any) -> Any:
        body = json.dumps(document).encode()
        request = urllib.request.Request(
            f"{self._url}/v1/{path}", body, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def groups(self) -> dict[str, list[int]]:
        """The groups without a failure, as the ranks' last heartbeats have them."""
        return {group["name"]: group["ranks"] for group in self.get("groups") if not group["failure"]}

    def until(self, **groups: list[int]) -> None:
        wait_until(lambda: self.groups() == groups, f"{groups}, but there are {self.groups()}", 20.0)


def live_until_told(me: Me) -> None:
    me.init(init_method="env://")
    dist.barrier()
    me.mark(f"there-{me.rank}")
    me.wait_for("done")
    os._exit(0)


@pytest.fixture
def started(ranks: Ranks, gateway: str) -> list[Rank]:
    made = ranks.start(live_until_told, 3, env={"RANKMESH_GATEWAY": gateway})
    ranks.wait_for(*(f"there-{rank}" for rank in range(3)))
    return made


@pytest.fixture
def job(ranks: Ranks, gateway: str, started: list[Rank]) -> Any:
    yield Gateway(gateway, ranks.job)
    ranks.mark("done")
    ranks.wait(started)


def test_made_grown_shrunk_and_aborted(job: Gateway) -> None:
    made = job.post("groups", job=job.job, ranks=[2, 0], name="pair")
    assert (made["name"], made["ranks"]) == ("pair", [2, 0])
    job.until(world=[0, 1, 2], pair=[2, 0])
    grown = job.post("groups/pair/grow", **{"with": [1]})
    assert (grown["made"]["name"], grown["made"]["ranks"]) == ("pair-2", [2, 0, 1])
    assert grown["ended"] == {"id": made["id"], "name": "pair", "asked": [2, 0], "answered": [2, 0], "failed": []}
    job.until(world=[0, 1, 2], **{"pair-2": [2, 0, 1]})
    shrunk = job.post("groups/pair-2/shrink", without=[2])
    assert (shrunk["made"]["name"], shrunk["made"]["ranks"]) == ("pair-3", [0, 1])
    job.until(world=[0, 1, 2], **{"pair-3": [0, 1]})
    aborted = job.post("groups/pair-3/abort", reason="the test says so")
    assert aborted["answered"] == [0, 1]
    assert job.post("groups", job=job.job, ranks=[1], name="mine")["ranks"] == [1]
    job.until(world=[0, 1, 2], mine=[1])
    refused = job.post("groups", job=job.job, ranks=[0, 1, 2], name="mine")
    assert (refused["status"], refused["code"]) == (409, "group-exists"), "all have it or none"
    assert job.post("groups", job=job.job, ranks=[0, 1, 2], name="ours")["ranks"] == [0, 1, 2]
    job.until(world=[0, 1, 2], mine=[1], ours=[0, 1, 2])
    (failed,) = (group["failure"] for group in job.get("groups") if group["name"] == "pair-3")
    assert "the test says so" in failed


def test_the_world_goes_on_without_one_that_was_killed(job: Gateway, started: list[Rank]) -> None:
    started[1].kill()
    wait_until(lambda: job.get("jobs")[0]["ranks"].get("failed"), "rank 1 to show as failed", 8.0)
    refused = job.post("groups", job=job.job, ranks=[0, 1])
    assert (refused["status"], refused["code"], refused["ranks"]) == (503, "rank-failed", [1])
    shrunk = job.post("groups/world/shrink")
    assert (shrunk["made"]["name"], shrunk["made"]["ranks"]) == ("world-2", [0, 2])
    assert shrunk["ended"]["answered"] == [0, 2]
    job.until(**{"world-2": [0, 2]})
