"""Point-to-point messages' arguments, as far as they can be told without a peer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rankmesh as dist

pytestmark = pytest.mark.usefixtures("alone")

NOBODY = dist.GroupMember.NON_GROUP_MEMBER
CALLS = {"send": dist.send, "isend": dist.isend, "recv": dist.recv, "irecv": dist.irecv}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every_call
def test_a_process_does_not_send_to_itself(call: Any) -> None:
    with pytest.raises(ValueError, match=r"(dst|src)=0 is this rank"):
        call(np.ones(1), 0)


@every_call
@pytest.mark.parametrize("rank", [1, -1, 100, "0"])
def test_a_rank_outside_the_group_is_refused(call: Any, rank: Any) -> None:
    with pytest.raises(ValueError, match=r"(dst|src)=.* is not in the group, whose ranks are \[0\]"):
        call(np.ones(1), rank)


@every_call
@pytest.mark.parametrize("tag", [1 << 63, -(1 << 63) - 1, 1.5, None, "1"])
def test_a_tag_is_a_whole_number_of_64_bits(call: Any, tag: Any) -> None:
    # No rank is right in a world of one, so the rank is complained about first; a receive from anybody has none.
    if call in (dist.recv, dist.irecv):
        with pytest.raises(ValueError, match="tag must be a whole number of 64 bits"):
            call(np.ones(1), tag=tag)
    else:
        with pytest.raises(ValueError, match="this rank"):
            call(np.ones(1), 0, tag=tag)


@pytest.mark.parametrize("call", [dist.recv, dist.irecv])
def test_a_receive_needs_an_array_it_can_write_to(call: Any) -> None:
    with pytest.raises(TypeError, match="tensor must be a NumPy array"):
        call([1.0])
    array = np.ones(3)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="tensor is read-only"):
        call(array)
    with pytest.raises(TypeError, match="cannot be communicated"):
        call(np.array(["text"]))


@every_call
@pytest.mark.parametrize("group", ["world", 0, object()])
def test_what_is_no_group_is_refused(call: Any, group: Any) -> None:
    with pytest.raises(TypeError, match="ProcessGroup"):
        call(np.ones(1), 0, group=group)


def test_nothing_happens_at_ranks_outside_the_group() -> None:
    array = np.ones(1)
    assert dist.send(array, 1, group=NOBODY) is None
    assert dist.isend(array, 1, group=NOBODY) is None
    assert dist.recv(array, 1, group=NOBODY) == -1
    assert dist.irecv(array, 1, group=NOBODY) is None


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_negative_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        dist.recv(np.ones(1), timeout=timeout)


def test_a_receive_in_a_world_of_one_ends_with_its_timeout() -> None:
    with pytest.raises(dist.CollectiveTimeoutError, match="recv"):
        dist.recv(np.ones(1), timeout=0.05)
    dist.barrier()
