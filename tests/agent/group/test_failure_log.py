"""First failures of a rank's groups: recorded once each, forgotten with their group."""

from __future__ import annotations

import time

from support.threads import world

from rankmesh_agent.groups import FailureLog
from rankmesh_agent.wire.errors import GroupAbortedError, RankFailedError


def test_the_first_failure_counts_until_its_group_is_removed() -> None:
    with world(3, "segment") as trio:
        first, second, third = (members.state for members in trio.communicators)
        second.global_ranks = (5, 6, 7)  # as after a shrink
        log = FailureLog()
        for state in (first, second, third):
            log.add_group(state)
        assert log.first() is None
        assert log.reason_to_end(0, 0.0) == (None, [])
        failures = [RankFailedError("rank 6 failed", ranks=[6]), RankFailedError("rank 0 failed", ranks=[0])]
        second.fail(failures[0])
        second.fail(failures[1])
        first.fail(failures[1])
        assert second.failure is failures[0]
        assert log.first() is failures[0]
        assert log.reason_to_end(0, 0.0) == (failures[0], [1]), "ranks of the job, not those by which errors name them"
        assert log.reason_to_end(1, 0.0) == (failures[0], [])
        assert log.naming([0]) is failures[1]
        assert log.naming([3]) is None
        assert log.reason_to_end(0, time.monotonic()) == (None, []), "the rank has gone on since"
        log.remove_group(second)
        assert log.first() is failures[1]
        assert log.reason_to_end(1, 0.0) == (failures[1], [0])
        log.record_end(third, failures[0])
        assert log.reason_to_end(0, time.monotonic())[0] is failures[0]
        third.mark_destroyed()
        log.remove_group(first)
        assert isinstance(third.failure, GroupAbortedError)
        assert log.first() is None, "a group that is destroyed has not failed"
