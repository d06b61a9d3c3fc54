"""The bucketer: what it averages, when it starts to, and what it says when it is used wrongly."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.processes import Me, on_ranks

import rankmesh as dist
from rankmesh.nn import GradientBucketer, _bucketer

FLOAT32_BYTES = 4


def layers(*sizes: int) -> dict[str, np.ndarray]:
    return {f"p{number}": np.zeros(size, np.float32) for number, size in enumerate(sizes)}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of elements of each all_reduce a bucketer has started."""
    sizes: list[int] = []

    def noting(flat: np.ndarray, *arguments: Any, **options: Any) -> Any:
        sizes.append(flat.size)
        return dist.all_reduce(flat, *arguments, **options)

    monkeypatch.setattr(_bucketer, "all_reduce", noting)
    return sizes


def test_without_a_world_it_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call init_process_group\(\) first"):
        GradientBucketer([np.zeros(1)])


@pytest.mark.usefixtures("alone")
class TestBuckets:
    def test_gradients_are_views_of_the_parameters_shapes_and_dtypes(self) -> None:
        parameters = {
            "w": np.ones((2, 3)),
            "b": np.ones(3, np.float16),
            "c": np.ones((1, 2), np.complex64).T,
            "scale": np.ones(()),
            "none": np.ones((0, 4)),
        }
        grads = GradientBucketer(parameters).grads
        assert list(grads) == list(parameters)
        for name, parameter in parameters.items():
            assert (grads[name].shape, grads[name].dtype) == (parameter.shape, parameter.dtype)
            assert not grads[name].any()
        assert grads["w"].base is grads["scale"].base, "one dtype, one bucket"

    def test_a_bucket_starts_as_soon_as_it_is_full_from_the_last_parameter_on(self, started: list[int]) -> None:
        bucketer = GradientBucketer(layers(1, 2, 4, 8, 16), bucket_bytes=12 * FLOAT32_BYTES)
        history = []
        for name in ("p4", "p3", "p2", "p1", "p0"):
            bucketer.ready(name)
            history.append(list(started))
        assert history == [[16], [16], [16, 12], [16, 12], [16, 12, 3]]
        bucketer.wait()

    def test_buckets_start_in_their_order_whatever_is_ready_first(self, started: list[int]) -> None:
        bucketer = GradientBucketer(layers(1, 2, 4), bucket_bytes=1)
        bucketer.ready("p0")
        bucketer.ready("p1")
        assert started == []
        bucketer.ready("p2")
        assert started == [4, 2, 1]
        bucketer.wait()

    def test_alternating_dtypes_share_buckets_too(self, started: list[int]) -> None:
        parameters = {}
        for number in range(3):
            parameters[f"w{number}"] = np.zeros(10, np.float16)
            parameters[f"b{number}"] = np.zeros(1, np.float32)
        bucketer = GradientBucketer(parameters)
        for name in reversed(parameters):
            bucketer.ready(name)
        bucketer.wait()
        assert started == [3, 30], "the float32 of the biases are complete first"

    def test_every_step_begins_anew(self, started: list[int]) -> None:
        bucketer = GradientBucketer(layers(2, 2), bucket_bytes=1)
        for step in range(1, 4):
            bucketer.ready("p1", np.full(2, step, np.float32))
            bucketer.ready("p0", np.full(2, -step, np.float32))
            bucketer.wait()
            assert started == [2, 2] * step
            assert bucketer.grads["p1"].tolist() == [step, step]
            assert bucketer.grads["p0"].tolist() == [-step, -step]

    def test_a_sequence_is_numbered(self) -> None:
        bucketer = GradientBucketer([np.zeros(2), np.zeros(3)])
        bucketer.ready(1, np.ones(3))
        bucketer.ready(0, np.float64(1) * np.ones(2))
        bucketer.wait()
        assert [grad.tolist() for grad in bucketer.grads.values()] == [[1, 1], [1, 1, 1]]

    def test_a_numpy_scalar_is_the_gradient_of_a_parameter_without_dimensions(self) -> None:
        bucketer = GradientBucketer({"scale": np.array(1.0)})
        bucketer.ready("scale", np.arange(4.0).sum())
        bucketer.wait()
        assert bucketer.grads["scale"] == 6

    def test_gradients_that_do_not_lie_in_order_are_copied(self) -> None:
        bucketer = GradientBucketer({"w": np.zeros((2, 3))})
        bucketer.ready("w", np.arange(6.0).reshape(3, 2).T)
        bucketer.wait()
        assert bucketer.grads["w"].tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.usefixtures("alone")
class TestWrongUse:
    @pytest.fixture
    def bucketer(self) -> Iterator[GradientBucketer]:
        """One that a refused call must leave as it was."""
        made = GradientBucketer({"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}, bucket_bytes=1)
        yield made
        made.ready("b", np.ones(3, np.float32))
        made.ready("w", np.ones((2, 3), np.float32))
        made.wait()
        assert made.grads["w"].sum() + made.grads["b"].sum() == 9

    def test_a_missing_gradient_is_named_and_can_still_be_given(self) -> None:
        bucketer = GradientBucketer(layers(1, 1, 1))
        bucketer.ready("p1")
        with pytest.raises(RuntimeError, match="no gradient was marked ready for 'p0', 'p2'; every parameter needs"):
            bucketer.wait()
        bucketer.ready("p0", np.array([5], np.float32))
        bucketer.ready("p2")
        bucketer.wait()
        assert bucketer.grads["p0"] == 5

    def test_the_same_gradient_twice(self) -> None:
        bucketer = GradientBucketer(layers(1, 1))
        bucketer.ready("p1")
        with pytest.raises(RuntimeError, match=r"'p1' was marked ready twice; wait\(\) has to come in between"):
            bucketer.ready("p1")
        bucketer.ready("p0")
        with pytest.raises(RuntimeError, match="'p0' was marked ready twice"):
            bucketer.ready("p0")
        bucketer.wait()

    @pytest.mark.parametrize("name", ["nobody", 0])
    def test_an_unknown_name(self, bucketer: GradientBucketer, name: Any) -> None:
        with pytest.raises(ValueError, match=f"there is no parameter {name!r}; there are 'w', 'b'"):
            bucketer.ready(name)

    @pytest.mark.parametrize(
        ("grad", "error", "got"),
        [
            (np.zeros(2, np.float32), ValueError, r"float32 \(2,\)"),
            (np.zeros((3, 1), np.float32), ValueError, r"float32 \(3, 1\)"),  # would be broadcast
            (np.float32(0), ValueError, r"float32 \(\)"),
            (np.zeros(3), TypeError, r"float64 \(3,\)"),
            ([0.0, 0.0, 0.0], TypeError, r"builtins\.list"),
            (0.0, TypeError, r"builtins\.float"),
        ],
    )
    def test_a_gradient_of_another_kind(
        self, bucketer: GradientBucketer, grad: Any, error: type[Exception], got: str
    ) -> None:
        with pytest.raises(error, match=rf"the gradient of 'b' must be float32 \(3,\), got {got}"):
            bucketer.ready("b", grad)

    @pytest.mark.parametrize(
        ("parameters", "options", "error", "says"),
        [
            ({}, {}, ValueError, "no parameters"),
            ([], {}, ValueError, "no parameters"),
            ([np.zeros(1)], {"bucket_bytes": 0}, ValueError, "bucket_bytes must be positive, got 0"),
            ([np.zeros(1)], {"group": dist.GroupMember.NON_GROUP_MEMBER}, ValueError, "not a member"),
            ({"w": [1.0]}, {}, TypeError, "parameter 'w' must be an array, got list"),
            ({"w": np.zeros(1, bool)}, {}, TypeError, "AVG is not defined for bool"),
            ({"w": np.zeros(1, object)}, {}, TypeError, "object"),
        ],
    )
    def test_what_cannot_be_averaged(
        self, parameters: Any, options: dict[str, Any], error: type[Exception], says: str
    ) -> None:
        with pytest.raises(error, match=says):
            GradientBucketer(parameters, **options)

    def test_a_negative_timeout(self) -> None:
        bucketer = GradientBucketer(layers(1))
        bucketer.ready("p0")
        with pytest.raises(ValueError, match="timeout"):
            bucketer.wait(timeout=-1)
        bucketer.wait(timeout=5)


# Over several ranks


@on_ranks(3)
def test_all_ranks_get_the_average_or_sum_whatever_order_they_come_in(me: Me) -> None:
    me.init()
    shapes = [(3, 4), (), (0,), (1000,), (7, 11)]
    for name, tolerance in (("float16", 1e-3), ("bfloat16", 1e-2), ("float32", 1e-6), ("complex64", 1e-6)):
        for average in (True, False):
            dtype = np.dtype(name)
            wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
            random = np.random.default_rng(1)  # the same numbers on all ranks: each knows what the others have
            bucketer = GradientBucketer([np.empty(shape, dtype) for shape in shapes], bucket_bytes=256, average=average)
            for _ in range(3):
                everyones = [
                    [np.asarray(random.normal(size=shape)).astype(dtype) for shape in shapes] for _ in range(me.size)
                ]
                order = np.random.default_rng(me.rank).permutation(len(shapes))  # another one on each rank
                for number in order.tolist():
                    bucketer.ready(number, everyones[me.rank][number])
                bucketer.wait()
                for number, grad in bucketer.grads.items():
                    total = np.sum([grads[number].astype(wide) for grads in everyones], axis=0)
                    wanted = total / me.size if average else total
                    np.testing.assert_allclose(grad.astype(wide), wanted, rtol=tolerance, atol=tolerance)
    dist.destroy_process_group()


@on_ranks(3)
def test_different_parameters_are_refused_on_all_ranks(me: Me) -> None:
    me.init()
    last = me.rank == me.size - 1
    kinds: list[tuple[dict[str, Any], str]] = [
        (
            {"parameters": {"w": np.zeros(3), "b": np.zeros(2 + last)}},
            "parameter 1 differ: rank 0: 'b' float64 (2,); rank 1: 'b' float64 (2,); rank 2: 'b' float64 (3,)",
        ),
        (
            {"parameters": {"w": np.zeros(3, "f4" if last else "f8")}},
            "parameter 0 differ: rank 0: 'w' float64 (3,); rank 1: 'w' float64 (3,); rank 2: 'w' float32 (3,)",
        ),
        (
            {"parameters": {"v" if last else "w": np.zeros(3)}},
            "parameter 0 differ: rank 0: 'w' float64 (3,); rank 1: 'w' float64 (3,); rank 2: 'v' float64 (3,)",
        ),
        (
            {"parameters": [np.zeros(3)] * (1 + last)},
            "parameter 1 differ: rank 0: nothing; rank 1: nothing; rank 2: 1 float64 (3,)",
        ),
        (
            {"parameters": [np.zeros(3)], "average": last},
            "average=False; rank 2: bucket_bytes=4194304, average=True",
        ),
    ]
    for arguments, difference in kinds:
        with pytest.raises(dist.CollectiveMismatchError, match=re.escape(difference) + "$"):
            GradientBucketer(**arguments)
    bucketer = GradientBucketer([np.zeros(1)])
    bucketer.ready(0, np.full(1, float(me.rank)))
    bucketer.wait()
    assert bucketer.grads[0].tolist() == [1.0]
    dist.destroy_process_group()


@on_ranks(2)
def test_a_rank_whose_wait_was_too_short_waits_again(me: Me) -> None:
    me.init()
    bucketer = GradientBucketer([np.zeros(4), np.zeros(4)], bucket_bytes=1)
    grad = np.full(4, me.rank + 1.0)
    bucketer.ready(1, grad)
    if me.rank == 1:
        me.wait_for("gave up")
    bucketer.ready(0, grad)
    if me.rank == 0:
        began = time.monotonic()
        with pytest.raises(dist.CollectiveTimeoutError):
            bucketer.wait(timeout=0.1)
        assert 0.1 <= time.monotonic() - began < 30
        with pytest.raises(RuntimeError, match="twice"):  # the step is not over
            bucketer.ready(0)
        me.mark("gave up")
    bucketer.wait()
    assert [grad.tolist() for grad in bucketer.grads.values()] == [[1.5] * 4] * 2
    dist.destroy_process_group()


@on_ranks(2)
def test_after_a_failed_step_the_next_one_begins_anew(me: Me) -> None:
    me.init()
    bucketer = GradientBucketer([np.zeros(4), np.zeros(4)], bucket_bytes=1)
    if me.rank == 0:
        bucketer.ready(1)
        bucketer.ready(0)
    with pytest.raises(dist.CollectiveMismatchError):
        bucketer.wait() if me.rank == 0 else dist.barrier()
    if me.rank == 1:
        dist.all_reduce(np.zeros(4), dist.ReduceOp.AVG)  # what the other's second bucket waits for
    for number in (1, 0):
        bucketer.ready(number, np.full(4, me.rank + 1.0))
    bucketer.wait()
    assert [grad.tolist() for grad in bucketer.grads.values()] == [[1.5] * 4] * 2
    dist.destroy_process_group()


@on_ranks(3)
def test_in_a_group_its_members_average(me: Me) -> None:
    me.init()
    group = dist.new_group([0, 2])
    if me.rank != 1:
        bucketer = GradientBucketer([np.zeros(2)], group=group)
        bucketer.grads[0][:] = me.rank
        bucketer.ready(0)
        bucketer.wait()
        assert bucketer.grads[0].tolist() == [1.0, 1.0]
    else:
        with pytest.raises(ValueError, match="not a member"):
            GradientBucketer([np.zeros(2)], group=group)
    dist.destroy_process_group()
