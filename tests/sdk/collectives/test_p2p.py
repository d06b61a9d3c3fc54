"""Point-to-point messages: their arguments, and who gets what from whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.processes import Me, on_ranks
from support.to_itself import exchange_with_itself

import rankmesh as dist

NOBODY = dist.GroupMember.NON_GROUP_MEMBER


class TestAlone:
    """As far as it can be told without a peer: in a world of one rank. test_wrong_calls.py has what is refused."""

    pytestmark = pytest.mark.usefixtures("alone")

    @pytest.mark.parametrize("tag", [0, -1, (1 << 63) - 1, -(1 << 63), np.int32(5), np.uint8(7)])
    def test_any_whole_number_is_a_tag(self, tag: Any) -> None:
        with pytest.raises(dist.CollectiveTimeoutError, match=rf"recv from any rank \(tag {int(tag)}\)"):
            dist.recv(np.ones(1), tag=tag, timeout=0)

    def test_send_is_refused_at_ranks_outside_the_group(self) -> None:
        with pytest.raises(ValueError, match="not a member of the group"):
            dist.send(np.ones(1), 1, group=NOBODY)

    @pytest.mark.parametrize("call", [dist.isend, dist.recv, dist.irecv])
    def test_other_messages_only_warn_at_ranks_outside_the_group(self, call: Any) -> None:
        with pytest.warns(RuntimeWarning, match=rf"^{call.__name__}\(\) does nothing") as warned:
            assert call(np.ones(1), 1, group=NOBODY) == (-1 if call is dist.recv else None)
        assert [warning.filename for warning in warned] == [__file__]

    # Messages to itself

    def test_a_ring_of_one(self) -> None:
        exchange_with_itself(dist, np.full)

    def test_a_wait_that_would_not_end_is_refused_and_leaves_nothing_behind(self) -> None:
        array = np.ones(3)
        for wait in (
            lambda: dist.send(array, 0),
            lambda: dist.recv(array, 0),
            lambda: dist.isend(array, 0).wait(),
            lambda: dist.irecv(array, 0).wait(),
        ):
            with pytest.raises(ValueError, match="is this rank: begin both sides of the message, isend and irecv"):
                wait()
        got = np.zeros(3)
        work = dist.irecv(got, 0)
        assert not work.is_completed()
        dist.send(np.full(3, 2.0), 0)
        assert work.is_completed()
        work.wait()
        assert (got == 2).all()
        for source in (0, None):
            work = dist.isend(np.full(3, 3.0), 0)
            assert dist.recv(got, source) == 0
            work.wait()

    def test_a_message_to_itself_that_does_not_fit_fails_at_both_ends(self) -> None:
        sent, received = dist.isend(np.ones(3), 0), dist.irecv(np.ones(4), 0)
        for work, says in ((sent, "rank 0 refused the message: rank 0 sent"), (received, "^rank 0 sent float64.3.")):
            with pytest.raises(dist.DistBackendError, match=says):
                work.wait()
        exchange_with_itself(dist, np.full)

    # Batches

    def test_a_p2pop_knows_its_peer_globally_and_in_its_group(self) -> None:
        for named in ({"peer": 0}, {"group_peer": 0}):
            op = dist.P2POp(dist.irecv, np.ones(1), tag=3, **named)
            assert (op.op, op.peer, op.group_peer, op.tag) == (dist.irecv, 0, 0, 3)
            assert repr(op) == "P2POp(irecv, peer=0, tag=3)"

    def test_a_batch_is_of_one_group(self) -> None:
        group = dist.new_group([0])
        ops = [dist.P2POp(dist.irecv, np.ones(1), 0, group=each) for each in (None, group)]
        with pytest.raises(ValueError, match="all messages of a batch must be of the same group"):
            dist.batch_isend_irecv(ops)
        dist.destroy_process_group(group)


# Several ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(3, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_messages_to_itself_and_an_invalid_batch_among_three_ranks(me: Me) -> None:
    me.init()
    rank = me.rank
    for each in (None, dist.new_group([2, 0, 1], sort_ranks=False), dist.new_subgroups(1)[0]):
        exchange_with_itself(dist, np.full, each)
    # A batch with something wrong in it begins nothing.
    if rank == 0:
        fixed = np.ones(3)
        fixed.flags.writeable = False
        ops = [dist.P2POp(dist.isend, np.zeros(3), 1, tag=4), dist.P2POp(dist.irecv, fixed, 2, tag=4)]
        reported = me.attempt(dist.batch_isend_irecv, ops)
        assert reported["error"] == "ValueError", reported
        dist.send(np.ones(3), 1, tag=4)
    elif rank == 1:
        got = np.zeros(3)
        dist.recv(got, 0, tag=4)
        assert (got == 1).all(), "the message of the batch that was refused"
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(3, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_a_short_message_that_does_not_fit_ends_its_group(me: Me) -> None:
    """Its send has returned: the next call of each rank raises the receiver's error. Other groups go on."""
    me.init()
    after = (me.rank + 1) % 3
    calls: dict[str, Callable[..., Any]] = {
        "barrier": dist.barrier,
        "all_reduce": lambda group: dist.all_reduce(np.ones(1), group=group),
        "async all_reduce": lambda group: dist.all_reduce(np.ones(1), group=group, async_op=True).wait(),
        "all_gather_object": lambda group: dist.all_gather_object([None] * 3, me.rank, group=group),
        "recv": lambda group: dist.recv(np.ones(1), after, group=group),
    }
    for name, call in calls.items():
        group = dist.new_group(range(3))
        if me.rank == 1:
            dist.send(np.zeros(3), 0, group=group)
        if me.rank == 0:
            reported = me.attempt(dist.recv, np.zeros(4), 1, group=group)
            assert reported["error"] == "DistBackendError", reported
            assert reported["text"].startswith("rank 1 sent float64[3] with tag 0, but the receive expects float64[4]")
        told = me.attempt(call, group)
        assert told["error"] == "GroupAbortedError", (name, told)
        assert "rank 0 refused the message: rank 1 sent float64[3] with tag 0, but the receive" in told["text"]
        assert told["ranks"] == [], "no rank has failed"
    dist.barrier()
    dist.destroy_process_group()
