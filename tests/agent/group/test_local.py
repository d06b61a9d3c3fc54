"""Failures of a group: timeouts, lost and leaving ranks; ranks as threads. test_wrong_calls.py has mismatches."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.pauses import despite_pauses
from support.threads import LATER, NOW, TRANSPORTS, World, world

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.work import Work
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    RankFailedError,
)
from rankmesh_agent.wire.ops import ReduceOp

TIMEOUT = 20.0


@pytest.fixture(params=TRANSPORTS)
def trio(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(3, request.param) as made:
        yield made


def reduce(members: LocalCommunicator, array: Any, timeout: float = TIMEOUT) -> None:
    members.all_reduce(array, ReduceOp.SUM, Options(timeout))


@despite_pauses
def test_an_address_that_is_not_known_is_named() -> None:
    why = "its address is not known, and the gateway at http://g does not answer"
    with world(2, "tcp") as two:

        def attempt(members: LocalCommunicator) -> None:
            if members.rank == 0:
                members.engine.unaddressed = {1: why, 5: "of no call"}
                with pytest.raises(CollectiveTimeoutError, match=rf"arrived: 0; rank 1: {why}$"):
                    reduce(members, np.ones(3), timeout=0.4)

        two.run(attempt)


def test_a_rank_that_left_does_not_disturb_messages_between_others(trio: World) -> None:
    left = threading.Event()

    def attempt(members: LocalCommunicator) -> None:
        if members.rank == 2:
            members.close()
            members.engine.close()
            left.set()
            return
        assert left.wait(TIMEOUT)
        other = 1 - members.rank
        got = np.zeros(200_000)
        work = members.send(np.ones(200_000), other, 0, LATER)
        members.receive(got, other, 0, NOW)
        assert work is not None
        work.wait()
        assert got.all()

    trio.run(attempt)


def test_a_receive_from_any_rank_goes_on_while_one_of_them_is_left(trio: World) -> None:
    waiting = threading.Event()

    def attempt(members: LocalCommunicator) -> None:
        if members.rank == 2:
            members.close()
            members.engine.close()
        elif members.rank == 1:
            assert waiting.wait(TIMEOUT)
            time.sleep(0.05)
            members.send(np.ones(3), 0, 0, NOW)
        else:
            deadline = Deadline(TIMEOUT)
            while 2 not in members.engine.lost_peers and not deadline.expired():
                members.engine.progress()
            waiting.set()
            assert members.receive(np.zeros(3), -1, 0, NOW) == 1

    trio.run(attempt)


def pending(members: LocalCommunicator) -> Any:
    """Begin a message before the loss; return its wait."""
    work = members.receive(np.zeros(3), 1, 0, LATER)
    return work.wait  # type: ignore[union-attr]


LEARNED = {
    "a call": lambda members: lambda: reduce(members, np.ones(3)),
    "a queued call": lambda members: lambda: members.all_reduce(np.ones(3), ReduceOp.SUM, LATER),
    "a message": lambda members: lambda: members.send(np.ones(3), 2, 0, NOW),
    "a message under way": pending,
}


@pytest.mark.parametrize("how", [*LEARNED, "the end"])
def test_a_rank_that_leaves_because_of_a_loss_reports_it_before(trio: World, how: str) -> None:
    """Rank 2 sees rank 0's goodbye; rank 1, the lost one, keeps its connection to rank 2."""
    over = threading.Event()

    def attempt(members: LocalCommunicator) -> None:
        mesh = members.engine
        if members.rank == 1:
            mesh._peers[0].connection.close()
            assert over.wait(TIMEOUT)
        elif members.rank == 0:
            call = LEARNED[how](members) if how in LEARNED else members.close
            deadline = Deadline(TIMEOUT)
            while 1 not in mesh.lost_peers and not deadline.expired():
                mesh.progress()
            if how in LEARNED:
                with pytest.raises(RankFailedError, match="rank 1 "):
                    call()
            else:
                call()
            mesh.close()
        else:
            with pytest.raises(RankFailedError, match=r"rank 1 \(here, pid \d+\) failed \(connection to ") as gone:
                reduce(members, np.ones(3))
            assert gone.value.ranks == (1,)
            over.set()

    trio.run(attempt)


def test_groups_that_differ_in_their_members_raise(trio: World) -> None:
    def attempt(members: LocalCommunicator) -> None:
        ranks = [0, 1, 2] if members.rank != 1 else [0, 1]
        with pytest.raises(DistBackendError):
            trio.group(members.rank, 55, "odd", ranks)

    trio.timeout = 0.3
    trio.run(attempt)


def test_an_error_of_a_group_keeps_no_array() -> None:
    with world(2, "tcp") as pair:
        members = pair.communicators[0]

        def fail() -> weakref.ref[Any]:
            array = np.ones(3)
            with pytest.raises(CollectiveTimeoutError):
                reduce(members, array, timeout=0.1)
            with pytest.raises(CollectiveTimeoutError):
                reduce(members, array)
            return weakref.ref(array)

        kept = fail()
        gc.collect()
        assert kept() is None
        assert members.state.failure is not None


def test_an_error_that_a_work_raises_again_is_the_same() -> None:
    with world(2, "tcp") as pair:
        members = pair.communicators[0]
        array = np.ones(3)
        receiving = members.receive(array, 1, 0, Options(0.1, async_op=True))
        reducing = members.all_reduce(array, ReduceOp.SUM, Options(0.1, async_op=True))
        for work in (receiving, reducing):
            assert isinstance(work, Work)
            raised = []
            for _ in range(3):
                with pytest.raises(DistBackendError) as caught:
                    work.wait()
                raised.append((str(caught.value), len(traceback.extract_tb(caught.value.__traceback__))))
            assert raised[1] == raised[2]
            assert raised[0][0] == raised[1][0]
