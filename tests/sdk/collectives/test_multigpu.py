"""The arguments of the collectives over lists of arrays, one a device elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rankmesh as dist

# Arguments, in a world of one rank

ONE, TWO = [np.zeros(3)], [np.zeros(3), np.zeros(3)]


@pytest.mark.usefixtures("alone")
class TestArguments:
    @pytest.mark.parametrize(
        "call",
        [
            lambda wrong: dist.broadcast_multigpu(wrong, 0),
            dist.all_reduce_multigpu,
            lambda wrong: dist.reduce_multigpu(wrong, 0),
            lambda wrong: dist.all_gather_multigpu([[np.zeros(3)]], wrong),
            lambda wrong: dist.all_gather_multigpu(wrong, ONE),
            lambda wrong: dist.all_gather_multigpu([wrong], ONE),
            lambda wrong: dist.reduce_scatter_multigpu(wrong, [ONE]),
            lambda wrong: dist.reduce_scatter_multigpu(ONE, wrong),
            lambda wrong: dist.reduce_scatter_multigpu(ONE, [wrong]),
        ],
        ids=[
            "broadcast", "all_reduce", "reduce", "all_gather-inputs", "all_gather-outputs", "all_gather-output",
            "reduce_scatter-outputs", "reduce_scatter-inputs", "reduce_scatter-input",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("wrong", [None, np.zeros((1, 3)), "x", []], ids=["None", "array", "text", "empty"])
    def test_what_is_no_list_of_arrays_is_refused(self, call: Callable[[Any], Any], wrong: Any) -> None:
        error, says = (
            (ValueError, "is empty") if isinstance(wrong, list) else (TypeError, "must be a list of arrays, got")
        )
        with pytest.raises(error, match=says):
            call(wrong)

    def test_lists_of_another_length_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"output_tensor_lists\[0\] has 2 arrays, but must have 1"):
            dist.all_gather_multigpu([TWO], ONE)
        with pytest.raises(ValueError, match=r"input_tensor_lists has 1 lists, but there are 2 outputs"):
            dist.reduce_scatter_multigpu(TWO, [TWO])
        with pytest.raises(ValueError, match=r"input_tensor_lists\[1\] has 1 arrays, but must have 2"):
            dist.reduce_scatter_multigpu(TWO, [TWO, ONE])

    @pytest.mark.parametrize("number", [1, -1])
    def test_an_array_that_is_not_in_the_list_is_refused(self, number: int) -> None:
        with pytest.raises(ValueError, match=rf"src_tensor={number} is not in the list, which has 1 arrays"):
            dist.broadcast_multigpu(ONE, 0, src_tensor=number)
        with pytest.raises(ValueError, match=rf"dst_tensor={number} is not in the list, which has 1 arrays"):
            dist.reduce_multigpu(ONE, 0, dst_tensor=number)

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
