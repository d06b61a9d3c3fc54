"""What every call has in common: its group, the ranks it names, its timeout, and Works instead of waiting."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist

NOBODY = dist.GroupMember.NON_GROUP_MEMBER


def collectives() -> dict[str, Any]:
    """Return every collective on arrays, by name, with arguments that are right in a world of any size.

    Each takes what all of them take: ``group``, ``async_op`` and ``timeout``; ``size`` is the group's, ``root`` one of
    its ranks, and ``at_root`` whether this process is that.
    """

    def each(size: int) -> list[np.ndarray[Any, Any]]:
        return [np.ones(2) for _ in range(size)]

    return {
        "all_reduce": lambda size, root, at_root, **how: dist.all_reduce(np.ones(2), **how),
        "reduce": lambda size, root, at_root, **how: dist.reduce(np.ones(2), group_dst=root, **how),
        "broadcast": lambda size, root, at_root, **how: dist.broadcast(np.ones(2), group_src=root, **how),
        "all_gather": lambda size, root, at_root, **how: dist.all_gather(each(size), np.ones(2), **how),
        "all_gather_single": lambda size, root, at_root, **how: dist.all_gather_single(
            np.ones(2 * size), np.ones(2), **how
        ),
        "gather": lambda size, root, at_root, **how: dist.gather(
            np.ones(2), each(size) if at_root else None, group_dst=root, **how
        ),
        "scatter": lambda size, root, at_root, **how: dist.scatter(
            np.ones(2), each(size) if at_root else None, group_src=root, **how
        ),
        "reduce_scatter": lambda size, root, at_root, **how: dist.reduce_scatter(np.ones(2), each(size), **how),
        "reduce_scatter_single": lambda size, root, at_root, **how: dist.reduce_scatter_single(
            np.ones(2), np.ones(2 * size), **how
        ),
        "all_to_all": lambda size, root, at_root, **how: dist.all_to_all(each(size), each(size), **how),
        "all_to_all_single": lambda size, root, at_root, **how: dist.all_to_all_single(
            np.ones(2 * size), np.ones(2 * size), **how
        ),
        "barrier": lambda size, root, at_root, **how: dist.barrier(**how),
    }


every_collective = pytest.mark.parametrize("name", collectives())


def call(name: str, **how: Any) -> Any:
    """Make a collective in a world of one rank."""
    return collectives()[name](1, 0, True, **how)


class TestEveryCollective:
    """In a world of one rank."""

    pytestmark = pytest.mark.usefixtures("alone")

    def test_a_repeated_call_enters_few_functions_before_its_algorithm(self) -> None:
        """An all_reduce of two ranks in shared memory enters 5 more, if it does not have to wait."""
        array, world = np.ones(512), dist.group.WORLD
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "all_reduce": (7, lambda: dist.all_reduce(array)),
            "all_reduce with shape": (7, lambda: dist.all_reduce(array.reshape(8, 64))),
            "all_reduce with group and timeout": (9, lambda: dist.all_reduce(array, group=world, timeout=5)),
            "broadcast": (11, lambda: dist.broadcast(array, 0)),
        }
        for name, (most, call) in calls.items():
            entered: list[str] = []

            def enter(frame: FrameType, event: str, _: object, entered: list[str] = entered) -> None:
                if event == "call":
                    entered.append(frame.f_code.co_qualname)

            call()
            sys.setprofile(enter)
            call()
            sys.setprofile(None)
            run = next(number for number, function in enumerate(entered) if function.endswith("Backend.run"))
            assert run <= most, (name, entered)  # the first is the lambda

    @every_collective
    def test_takes_a_timedelta_or_seconds(self, name: str) -> None:
        for timeout in (timedelta(seconds=5), 5, 0.5, np.float64(3), np.array(3), None):
            assert call(name, timeout=timeout) is None

    @every_collective
    def test_does_nothing_and_warns_at_ranks_outside_the_group(self, name: str) -> None:
        for async_op in (False, True):
            with pytest.warns(RuntimeWarning, match=rf"^{name}\(\) does nothing on this rank") as warned:
                assert call(name, group=NOBODY, async_op=async_op) is None
            assert [warning.filename for warning in warned] == [__file__], "where the user called"

    @every_collective
    def test_takes_the_world_by_its_name(self, name: str) -> None:
        assert call(name, group=dist.group.WORLD) is None
        assert call(name, group=dist.GroupMember.WORLD) is None

    @every_collective
    def test_gives_a_work_when_asynchronous(self, name: str) -> None:
        work = call(name, async_op=True)
        assert isinstance(work, dist.Work)
        assert work.wait() is True
        assert work.wait(timeout=1) is True, "again"
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None

    @every_collective
    def test_has_its_timeout_last_and_torchs_arguments_first(self, name: str) -> None:
        parameters = inspect.signature(getattr(dist, name)).parameters
        assert list(parameters)[-1] == "timeout"
        assert parameters["group"].default is None
        assert parameters["async_op"].default is False


@pytest.mark.usefixtures("alone")
class TestRoots:
    """The rank that a call names, globally or in its group: in a world of one rank."""

    def test_gather_and_scatter_are_rank_0s_by_default(self) -> None:
        assert dist.gather(np.ones(1), [np.ones(1)]) is None
        assert dist.scatter(np.ones(1), [np.ones(1)]) is None

    def test_a_numpy_number_is_a_rank(self) -> None:
        for name in ("reduce", "broadcast", "gather", "scatter"):
            assert collectives()[name](1, np.int64(0), True) is None
        assert dist.reduce(np.ones(1), np.int64(0)) is None
        assert dist.broadcast(np.ones(1), np.int64(0)) is None


# Several ranks


def be_late(me: Me) -> None:
    me.init()
    calls = collectives()
    errors = {}
    for name, make in calls.items():
        for root in (0, 1) if name in ("reduce", "broadcast", "gather", "scatter") else (0,):
            for async_op in (False, True):
                group = dist.new_group()
                if me.rank == 0:

                    def run(make: Any = make, root: int = root, async_op: bool = async_op, group: Any = group) -> None:
                        work = make(2, root, root == 0, group=group, async_op=async_op, timeout=0.1)
                        if work is not None:
                            work.wait()

                    errors[f"{name} root={root} async_op={async_op}"] = me.attempt(run)
                dist.barrier()  # the world is none the worse
                dist.destroy_process_group(group)
    me.report(errors=errors)
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_collective_names_the_rank_that_does_not_come_in_time(ranks: Ranks, transport: str) -> None:
    zero, _ = ranks.run(be_late, 2, env={"RANKMESH_TRANSPORT": transport})
    errors = zero.reported["errors"]
    assert len(errors) == 2 * (12 + 4)
    for name, reported in errors.items():
        assert reported["error"] == "CollectiveTimeoutError", (name, reported)
        assert reported["ranks"] == [1], name
        assert f"{name.split()[0].removesuffix('_single')} #1 in group" in reported["text"], name
        assert "waited 0.1 s for rank 1" in reported["text"], name
        assert "arrived: 0" in reported["text"], name
        assert 0.09 < reported["seconds"] < 30, name
