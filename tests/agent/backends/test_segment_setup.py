"""How the members of a group come to share memory on each host, or find out together that they cannot."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import threads
from support.threads import NOW, World, world

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.shared_memory.mapping import Mapping
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.ops import ReduceOp


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the ranks make shared memory."""
    monkeypatch.setattr(threads, "SHM", str(tmp_path))
    return tmp_path


def works(ranks: World) -> None:
    """Fail unless collectives of every length are right."""

    def call(members: LocalCommunicator) -> None:
        for count in (1, 100_000):
            array = np.ones(count)
            members.all_reduce(array, ReduceOp.SUM, NOW)
            assert (array == members.size).all()

    ranks.run(call)


@pytest.mark.parametrize(
    ("hosts", "medium"),
    [("aaa", "shm"), ("aab", "shm+tcp"), ("aba", "shm+tcp"), ("abb", "shm+tcp"), ("abc", "tcp"), ("ab", "tcp")],
)
def test_what_carries_a_group(hosts: str, medium: str, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with world(len(hosts), "tcp", hosts=hosts) as ranks:
        assert {members.medium for members in ranks.communicators} == {medium}
        assert not list(directory.iterdir()), "the name is gone once all have it"
        works(ranks)
    assert not caplog.records


def test_each_host_makes_one_memory_and_a_lone_rank_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    create = Mapping.create

    def counting(*arguments: Any, **named: Any) -> Mapping:
        made.append(arguments)
        return create(*arguments, **named)

    monkeypatch.setattr(Mapping, "create", counting)
    with world(6, "tcp", hosts="aabbbc"):
        assert len(made) == 2


@pytest.mark.parametrize("hindered", ["create", "open"])
def test_if_one_host_has_no_memory_none_has_and_one_warning_says_why(
    hindered: str, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = []
    real = getattr(Mapping, hindered)

    def fail(*arguments: Any, **named: Any) -> Any:
        attempts.append(arguments)
        if len(attempts) == 2:
            raise DistNetworkError("/dev/shm has no room for 2 MiB of shared memory")
        return real(*arguments, **named)

    monkeypatch.setattr(Mapping, hindered, fail)
    with caplog.at_level(logging.WARNING, "rankmesh"), world(5, "tcp", hosts="abbaa") as ranks:
        assert {members.medium for members in ranks.communicators} == {"tcp"}
        assert not list(directory.iterdir())
        works(ranks)
    (record,) = caplog.records
    assert "collectives go over TCP, not shared memory: /dev/shm has no room for 2 MiB" in record.getMessage()


@pytest.mark.parametrize("hosts", ["aaa", "aabb", "abab"])
def test_members_that_want_slots_of_different_lengths_take_the_shortest(
    hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, lengths = threads.SegmentOptions, itertools.count(5)
    monkeypatch.setattr(threads, "SegmentOptions", lambda *of, **named: made(*of[:3], next(lengths) << 12, **named))
    with world(len(hosts), "tcp", hosts=hosts) as ranks:
        works(ranks)
        assert {members.queue.backend.medium for members in ranks.communicators} <= {"shm", "shm+tcp"}


def test_who_must_share_one_memory_says_that_there_are_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = threads.SegmentOptions
    monkeypatch.setattr(threads, "SegmentOptions", lambda *given, **named: sharing(*given, **{**named, "strict": True}))
    with pytest.raises(DistNetworkError, match=r"=shm, but group rank 0 cannot: .* not all on one host"):
        World(3, "tcp", hosts="aab")
