"""Uneven gather and scatter among more ranks than describe their calls one by one."""

from __future__ import annotations

import numpy as np
import pytest
from support.threads import NOW, TRANSPORTS, world

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.wire.errors import CollectiveMismatchError

SIZE = 20


@pytest.mark.parametrize("hosts", ["", "a" * 12 + "b" * 8], ids=["one host", "two hosts"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_ranks_each_with_a_length_of_its_own(transport: str, hosts: str) -> None:
    def rounds(comm: LocalCommunicator) -> list[bool]:
        right = []
        for lengths in (range(1, SIZE + 1), range(1, SIZE + 1), [5] * SIZE, range(SIZE, 0, -1)):
            arrays = [np.arange(n) + 100 * rank for rank, n in enumerate(lengths)]
            outputs = [np.zeros(n, np.int64) for n in lengths] if comm.rank == 3 else []
            comm.gather(outputs, arrays[comm.rank], 3, NOW)
            right.append(all(np.array_equal(*pair) for pair in zip(outputs, arrays, strict=False)))
            output = np.zeros_like(arrays[comm.rank])
            comm.scatter(output, arrays if comm.rank == 17 else [], 17, NOW)
            right.append(np.array_equal(output, arrays[comm.rank]))
        wrong = [np.zeros(n, np.int64) for n in range(SIZE)] if comm.rank == 0 else []
        with pytest.raises(CollectiveMismatchError, match=r"rank 19: gather\(int64, dst=0\) \(has 20 elements\)"):
            comm.gather(wrong, np.zeros(comm.rank + (comm.rank == 19), np.int64), 0, NOW)
        return right

    with world(SIZE, transport, hosts=hosts) as made:
        assert made.run(rounds) == [[True] * 8] * SIZE
