"""The questions about groups, and making them, in a world of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankmesh as dist

NOBODY = dist.GroupMember.NON_GROUP_MEMBER


@pytest.fixture(scope="class")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is rank 0 of 1, for the tests of a class; the others begin and end a world of their own."""
    path = tmp_path_factory.mktemp("alone") / "rendezvous"
    dist.init_process_group(init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
class TestInside:
    def test_who_and_how_many(self) -> None:
        assert dist.is_initialized()
        assert dist.get_rank() == 0
        assert dist.get_world_size() == 1
        assert dist.get_backend() == "mesh"
        assert dist.get_process_group_ranks() == [0]

    def test_a_group_of_all_ranks_and_of_some(self) -> None:
        for ranks in (None, [0], (0,), range(1), np.arange(1)):
            group = dist.new_group(ranks)
            assert isinstance(group, dist.ProcessGroup)
            assert (dist.get_rank(group), dist.get_world_size(group)) == (0, 1)
            assert (group.rank(), group.size(), group.name()) == (0, 1, "mesh")
            assert dist.get_backend(group) == "mesh"
            assert dist.get_process_group_ranks(group) == [0]
            dist.destroy_process_group(group)

    def test_groups_with_the_same_ranks_are_not_the_same_group(self) -> None:
        one, two = dist.new_group([0]), dist.new_group([0])
        assert one.group_name != two.group_name
        dist.destroy_process_group(one)
        dist.barrier(group=two)
        dist.destroy_process_group(two)

    def test_a_group_says_what_it_is(self) -> None:
        group = dist.new_group([0])
        assert group.group_name in repr(group)
        assert "rank 0 of 1" in repr(group)
        dist.destroy_process_group(group)

    @pytest.mark.parametrize(
        ("ranks", "says"),
        [
            ([], "at least one"),
            ([0, 0], "twice"),
            ([1], "0 to 0"),
            ([-1], "0 to 0"),
            ([0, 1], "0 to 0"),
        ],
    )
    def test_ranks_that_make_no_group_are_refused(self, ranks: list[int], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            dist.new_group(ranks)

    @pytest.mark.parametrize("timeout", [timedelta(seconds=3), 3, 0.5])
    def test_a_group_has_its_own_timeout(self, timeout: Any) -> None:
        group = dist.new_group([0], timeout=timeout)
        dist.barrier(group=group)
        dist.destroy_process_group(group)

    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    def test_a_negative_timeout_is_refused(self, timeout: float) -> None:
        with pytest.raises(ValueError, match="timeout"):
            dist.new_group([0], timeout=timeout)

    def test_an_unknown_backend_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'mesh'"):
            dist.new_group([0], backend="smoke-signals")
        dist.destroy_process_group(dist.new_group([0], backend="gloo"))

    def test_a_destroyed_group_says_so(self) -> None:
        group = dist.new_group([0])
        dist.destroy_process_group(group)
        with pytest.raises(dist.GroupAbortedError, match="destroyed"):
            dist.barrier(group=group)
        with pytest.raises(dist.GroupAbortedError, match="destroyed"):
            dist.all_reduce(np.ones(1), group=group, async_op=True)
        dist.barrier()

    def test_outside_a_group_there_is_no_rank(self) -> None:
        assert dist.get_rank(NOBODY) == -1
        assert dist.get_world_size(NOBODY) == -1
        assert dist.destroy_process_group(NOBODY) is None
        assert "NON_GROUP_MEMBER" in repr(NOBODY)
        for ask in (dist.get_backend, dist.get_process_group_ranks):
            with pytest.raises(ValueError, match="not a member"):
                ask(NOBODY)

    @pytest.mark.parametrize(
        "ask", [dist.get_rank, dist.get_world_size, dist.get_backend, dist.get_process_group_ranks]
    )
    @pytest.mark.parametrize("group", ["world", 0, object()])
    def test_what_is_no_group_is_refused(self, ask: Any, group: Any) -> None:
        with pytest.raises(TypeError, match="ProcessGroup"):
            ask(group)

    def test_the_list_of_ranks_is_the_callers_own(self) -> None:
        dist.get_process_group_ranks().append(7)
        assert dist.get_process_group_ranks() == [0]


def test_it_is_there() -> None:
    assert dist.is_available() is True
    assert dist.default_pg_timeout == timedelta(minutes=30)


@pytest.mark.parametrize("backend", [None, "mesh", "gloo", "cpu:gloo,cuda:nccl", "GLOO"])
def test_scripts_written_for_gloo_run(tmp_path: Path, backend: str | None) -> None:
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    assert dist.get_backend() == "mesh"
    dist.destroy_process_group()
    assert not dist.is_initialized()


def test_a_group_of_a_world_that_ended_says_so(tmp_path: Path) -> None:
    dist.init_process_group(init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    group = dist.new_group([0])
    dist.destroy_process_group()
    with pytest.raises(dist.GroupAbortedError, match="destroyed"):
        dist.barrier(group=group)
    with pytest.raises(ValueError, match=r"init_process_group\(\) first"):
        dist.barrier()
