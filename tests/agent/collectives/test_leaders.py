"""Short calls over several hosts, for which one rank of each host speaks: who sends how much. Ranks as threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.threads import NOW, World, world

from rankmesh_agent.collectives import hosts
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.ops import ReduceOp

LAYOUT = "aabbacb"
"""Hosts whose ranks are not in a row, one of a single rank."""
SIZE = len(LAYOUT)
LEADERS = {0, 2, 5}


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(SIZE, "tcp", hosts=LAYOUT) as made:
        yield made


def all_reduce(members: LocalCommunicator, options: Options = NOW) -> None:
    members.all_reduce(np.ones(3), ReduceOp.SUM, options)


def broadcast(members: LocalCommunicator, options: Options = NOW) -> None:
    members.broadcast(np.ones(3), 6, options)


@pytest.mark.parametrize("call", [LocalCommunicator.barrier, all_reduce, broadcast], ids=lambda call: call.__name__)
def test_only_leaders_send(ranks: World, call: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[int] = Counter()
    send = MessageLink._send

    def counted(link: MessageLink, members: Any, header: bytes, payload: Any) -> Any:
        if frames.decode(header).part < 1000:  # not an announcement
            sent[link.rank] += len(members)
        return send(link, members, header, payload)

    monkeypatch.setattr(MessageLink, "_send", counted)
    ranks.run(lambda members: call(members, NOW))
    assert set(sent) <= LEADERS
    assert max(sent.values()) <= 3


# Long arrays among many hosts


@pytest.mark.parametrize("layout", ["aabbcc", "abbcaca", "abcda"])
def test_among_many_hosts_each_leader_sends_to_few_others(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "FEW_RANKS", 2)
    size = len(layout)

    def call(members: LocalCommunicator) -> None:
        for count in (40_000, 200_001):
            array = np.full(count, float(members.rank))
            members.all_reduce(array, ReduceOp.SUM, NOW)
            assert (array == size * (size - 1) / 2).all()
            narrow = np.full(count, members.rank + 1, np.float16)
            members.all_reduce(narrow, ReduceOp.AVG, NOW)
            assert (narrow == np.float16((size + 1) / 2)).all()
            numbers = np.full(count, members.rank, np.int32)
            members.reduce(numbers, ReduceOp.MAX, 1, NOW)
            assert (numbers == (size - 1 if members.rank == 1 else members.rank)).all()
            drawn = np.random.default_rng([members.rank, count]).normal(size=count)
            members.broadcast(drawn, size - 2, NOW)
            np.testing.assert_array_equal(drawn, np.random.default_rng([size - 2, count]).normal(size=count))

    with world(size, "tcp", hosts=layout, slot_bytes=1 << 17) as made:
        made.run(call)
