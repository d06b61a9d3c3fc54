"""Collectives with one array per rank, beside the sweep's results and the table of wrong calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.processes import Me, on_ranks

import rankmesh as dist


class TestAlone:
    """In a world of one rank."""

    pytestmark = pytest.mark.usefixtures("alone")

    LISTS: dict[str, Callable[[Any], Any]] = {  # noqa: RUF012  # never changed
        "all_gather": lambda tensors: dist.all_gather(tensors, np.ones(1)),
        "gather": lambda tensors: dist.gather(np.ones(1), tensors),
        "scatter": lambda tensors: dist.scatter(np.ones(1), tensors),
        "reduce_scatter": lambda tensors: dist.reduce_scatter(np.ones(1), tensors),
        "inputs": lambda tensors: dist.all_to_all([np.ones(1)], tensors),
        "outputs": lambda tensors: dist.all_to_all(tensors, [np.ones(1)]),
    }

    @pytest.mark.parametrize("name", LISTS)
    def test_a_tuple_will_do(self, name: str) -> None:
        assert self.LISTS[name]((np.ones(1),)) is None

    def test_the_other_names(self) -> None:
        assert dist.all_gather_v is dist.all_gather
        assert dist.reduce_scatter_v is dist.reduce_scatter
        assert dist.gather_into_tensor is dist.gather_single
        assert dist.all_gather_into_tensor is dist.all_gather_single
        assert dist.reduce_scatter_tensor is dist.reduce_scatter_single

    def test_splits_may_be_left_out(self) -> None:
        for splits in (None, [], (), np.array([3])):
            output = np.zeros((3, 2))
            dist.all_to_all_single(output, np.ones((3, 2)), splits, splits)
            assert output.all()

    def test_inputs_may_be_read_only(self) -> None:
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        output = np.ones(3)
        dist.all_gather_multigpu([[output]], [frozen])
        assert not output.any()

    def test_nothing_happens_at_ranks_outside_the_group(self) -> None:
        nobody = dist.GroupMember.NON_GROUP_MEMBER
        with pytest.warns(RuntimeWarning, match="not a member"):
            assert dist.all_reduce_multigpu([None], group=nobody, async_op=True) is None


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(3, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_a_length_that_the_root_does_not_expect_is_an_error_on_all_ranks(me: Me) -> None:
    """Of arrays that differ in length."""
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
    dist.gather(np.full(me.rank + 2, 7.0), outputs, 0, uneven=True)
    assert all((output == 7).all() for output in outputs or [])
    dist.destroy_process_group()
