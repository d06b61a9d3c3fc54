"""Messages that a rank sends with its arrival: they come before the call of their receiver, or after its end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.threads import LATER, NOW, World, world

from rankmesh_agent.collectives import all_reduce
from rankmesh_agent.collectives.select import algorithm
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.wire.ops import OpType, ReduceOp

SIZE, COUNT = 3, 200_000


@pytest.fixture
def ranks() -> Iterator[World]:
    assert algorithm(OpType.ALL_REDUCE, "link", 8 * COUNT, SIZE) is all_reduce.direct_link
    with world(SIZE, "tcp") as made:
        yield made


def test_a_message_behind_them_is_received_before_the_call(ranks: World) -> None:
    def run(members: LocalCommunicator) -> None:
        for number in range(3):
            array = np.full(COUNT, float(members.rank))
            if members.rank == 0:
                work = members.all_reduce(array, ReduceOp.SUM, LATER)
                members.send(np.full(1, number), 1, 0, NOW)
                assert work is not None
                work.wait()
            else:
                if members.rank == 1:
                    received = np.zeros(1, int)
                    members.receive(received, 0, 0, NOW)
                    assert received[0] == number
                members.all_reduce(array, ReduceOp.SUM, NOW)
            assert (array == SIZE * (SIZE - 1) / 2).all()

    ranks.run(run)
