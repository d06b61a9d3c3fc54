"""The arguments of the collectives over lists of arrays, one a device elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

import rankmesh as dist


@pytest.mark.usefixtures("alone")
class TestArguments:
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
