"""gather and scatter of arrays that differ in length; test_sweep.py compares them with NumPy in every medium."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.processes import Me, on_ranks

import rankmesh as dist

Array = np.ndarray[Any, Any]


def own(rank: int, lengths: tuple[int, ...]) -> Array:
    return np.arange(lengths[rank], dtype=np.float32) + 100 * rank


def gathered(lengths: tuple[int, ...], dst: int, **how: Any) -> Any:
    """Gather; return what comes, at the destination."""
    rank = dist.get_rank()
    outputs = [np.zeros(length, np.float32) for length in lengths] if rank == dst else None
    work = dist.gather(own(rank, lengths), outputs, dst, uneven=True, **how)
    return (work, outputs) if how else outputs


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(3, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_asynchronously_and_behind_other_calls(me: Me) -> None:
    me.init()
    begun = [gathered((2, 50_000, 7), 1, async_op=True) for _ in range(3)]
    total = np.ones(2)
    dist.all_reduce(total)
    assert total[0] == 3
    for work, outputs in begun:
        assert work.wait()
        for rank, output in enumerate(outputs or []):
            np.testing.assert_array_equal(output, own(rank, (2, 50_000, 7)))
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(3, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_a_length_that_the_root_does_not_expect_is_an_error_on_all_ranks(me: Me) -> None:
    me.init()
    outputs = [np.zeros(n) for n in (2, 3, 4)] if me.rank == 0 else None
    with pytest.raises(dist.CollectiveMismatchError) as caught:
        dist.gather(np.ones((2, 3, 5)[me.rank]), outputs, 0, uneven=True)
    message = str(caught.value)
    assert "rank 0: all_to_all(float64) (sends [2, 0, 0] elements to the ranks and expects [2, 3, 4])" in message
    assert "rank 2: all_to_all(float64) (sends [5, 0, 0] elements to the ranks and expects [0, 0, 0])" in message
    inputs = [np.ones(n) for n in (2, 3, 4)] if me.rank == 1 else None
    with pytest.raises(dist.CollectiveMismatchError, match=r"rank 0: .*expects \[0, 9, 0\]"):
        dist.scatter(np.ones((9, 3, 4)[me.rank]), inputs, 1, uneven=True)
    dtype = np.float32 if me.rank == 2 else np.float64
    with pytest.raises(dist.CollectiveMismatchError, match="rank 2: all_to_all"):
        dist.gather(np.ones(me.rank + 1, dtype), [np.ones(n) for n in (1, 2, 3)] if me.rank == 0 else None, uneven=True)
    with pytest.raises(dist.CollectiveMismatchError, match=r"rank 1: gather\(float64\[2\], dst=0\)"):
        dist.gather(np.ones(2), [np.ones(2)] * 3 if me.rank == 0 else None, uneven=me.rank != 1)
    assert [each.size for each in gathered((1, 2, 3), 0) or []] == ([1, 2, 3] if me.rank == 0 else [])
    dist.destroy_process_group()
