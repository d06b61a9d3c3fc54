"""The collectives in which a rank has an array for, or of, each rank: their arguments, and what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist

Array = np.ndarray[Any, Any]


def read_only(count: int = 3) -> Array:
    array = np.ones(count)
    array.flags.writeable = False
    return array


class TestAlone:
    """In a world of one rank."""

    pytestmark = pytest.mark.usefixtures("alone")

    COPIES: dict[str, Callable[[Array, Array], Any]] = {  # noqa: RUF012  # never changed
        "all_gather": lambda output, array: dist.all_gather([output], array),
        "all_gather_single": dist.all_gather_single,
        "gather": lambda output, array: dist.gather(array, [output]),
        "scatter": lambda output, array: dist.scatter(output, [array]),
        "reduce_scatter": lambda output, array: dist.reduce_scatter(output, [array]),
        "reduce_scatter_single": dist.reduce_scatter_single,
        "all_to_all": lambda output, array: dist.all_to_all([output], [array]),
        "all_to_all_single": dist.all_to_all_single,
    }
    every_copy = pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)

    @every_copy
    @pytest.mark.parametrize(
        "make", [lambda: np.zeros(6), lambda: np.zeros(12)[::2], lambda: np.zeros((2, 3)).T, lambda: np.zeros((6, 1))]
    )
    def test_with_one_rank_they_copy(self, copy: Any, make: Any) -> None:
        output, array = make(), np.arange(6.0).reshape(make().shape)
        array.flags.writeable = False
        assert copy(output, array) is None
        np.testing.assert_array_equal(output, array)

    @every_copy
    def test_empty_and_0_dimensional_arrays_are_arrays(self, copy: Any) -> None:
        copy(np.zeros(0), np.zeros(0))
        output = np.zeros((1,))
        copy(output, np.ones((1,)))
        assert output.all()
        if copy is not dist.all_to_all_single:
            output = np.zeros(())
            copy(output, np.array(2.0))
            assert output == 2

    @every_copy
    @pytest.mark.parametrize("tensor", [3, "x", np.array(["a"]), np.array([None])], ids=repr)
    def test_what_is_no_array_of_numbers_is_refused(self, copy: Any, tensor: Any) -> None:
        with pytest.raises(TypeError):
            copy(np.zeros(1), tensor)
        with pytest.raises(TypeError):
            copy(tensor, np.zeros(1))

    @every_copy
    def test_outputs_must_be_writable(self, copy: Any) -> None:
        with pytest.raises(ValueError, match="is read-only"):
            copy(read_only(), np.ones(3))

    @every_copy
    @pytest.mark.parametrize("count", [0, 2, 4])
    def test_sizes_must_fit(self, copy: Any, count: int) -> None:
        if copy is self.COPIES["all_to_all"] or copy is dist.all_to_all_single:
            with pytest.raises(dist.CollectiveMismatchError, match=rf"sends \[3\] elements .* expects \[{count}\]"):
                copy(np.zeros(count), np.ones(3))
            return
        output = np.zeros(count)
        with pytest.raises(ValueError, match=r"has \d elements, but"):
            copy(output, np.ones(3))
        assert not output.any()

    @every_copy
    @pytest.mark.parametrize("dtype", ["f4", "i8", "?"])
    def test_dtypes_must_be_the_same(self, copy: Any, dtype: str) -> None:
        with pytest.raises(
            ValueError, match=rf"has dtype .* has .*{np.dtype(dtype).name}|{np.dtype(dtype).name}.* has"
        ):
            copy(np.zeros(3, dtype), np.ones(3))

    LISTS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # noqa: RUF012  # never changed
        "all_gather": ("tensor_list", lambda tensors: dist.all_gather(tensors, np.ones(1))),
        "gather": ("gather_list", lambda tensors: dist.gather(np.ones(1), tensors)),
        "scatter": ("scatter_list", lambda tensors: dist.scatter(np.ones(1), tensors)),
        "reduce_scatter": ("input_list", lambda tensors: dist.reduce_scatter(np.ones(1), tensors)),
        "inputs": ("input_tensor_list", lambda tensors: dist.all_to_all([np.ones(1)], tensors)),
        "outputs": ("output_tensor_list", lambda tensors: dist.all_to_all(tensors, [np.ones(1)])),
    }
    every_list = pytest.mark.parametrize(("name", "call"), LISTS.values(), ids=LISTS)

    @every_list
    @pytest.mark.parametrize("count", [0, 2, 3])
    def test_a_list_has_one_array_a_rank(self, name: str, call: Any, count: int) -> None:
        with pytest.raises(ValueError, match=f"{name} has {count} arrays, but the group has 1 ranks"):
            call([np.ones(1)] * count)

    @every_list
    @pytest.mark.parametrize(
        "tensors", [np.ones((1, 1)), 5, "x", {0: np.ones(1)}, iter([])], ids=lambda value: type(value).__name__
    )
    def test_a_list_is_a_list(self, name: str, call: Any, tensors: Any) -> None:
        with pytest.raises(TypeError, match=f"{name} must be a list of 1 arrays, one a rank, got"):
            call(tensors)

    @every_list
    def test_an_array_of_a_list_is_named(self, name: str, call: Any) -> None:
        with pytest.raises(TypeError, match=rf"{name}\[0\]"):
            call(["x"])

    @every_list
    def test_a_tuple_will_do(self, name: str, call: Any) -> None:
        assert call((np.ones(1),)) is None

    @pytest.mark.parametrize("nothing", [None])
    def test_the_root_needs_its_list(self, nothing: None) -> None:
        with pytest.raises(ValueError, match="gather_list is missing: on the destination rank give a list"):
            dist.gather(np.ones(1), nothing)
        with pytest.raises(ValueError, match="scatter_list is missing: on the source rank give a list"):
            dist.scatter(np.ones(1), nothing)

    def test_the_other_names(self) -> None:
        assert dist.all_gather_v is dist.all_gather
        assert dist.reduce_scatter_v is dist.reduce_scatter
        assert dist.all_gather_into_tensor is dist.all_gather_single
        assert dist.reduce_scatter_tensor is dist.reduce_scatter_single

    @pytest.mark.parametrize(
        ("sizes", "error"),
        [([1], ValueError), ([3, 0], ValueError), ([-3], ValueError), ([4], ValueError), ([3.0], TypeError)],
    )
    def test_splits_are_one_a_rank_and_add_up_to_the_rows(self, sizes: Any, error: type[Exception]) -> None:
        for name, splits in (("output", (sizes, None)), ("input", (None, sizes))):
            with pytest.raises(error, match=rf"{name}_split_sizes"):
                dist.all_to_all_single(np.zeros((3, 2)), np.ones((3, 2)), *splits)

    def test_splits_may_be_left_out(self) -> None:
        for splits in (None, [], (), np.array([3])):
            output = np.zeros((3, 2))
            dist.all_to_all_single(output, np.ones((3, 2)), splits, splits)
            assert output.all()

    @pytest.mark.parametrize("op", ["SUM", None])
    def test_what_is_no_reduce_op_is_refused(self, op: Any) -> None:
        for call in (
            lambda: dist.reduce_scatter(np.ones(1), [np.ones(1)], op),
            lambda: dist.reduce_scatter_single(np.ones(1), np.ones(1), op),
        ):
            with pytest.raises(TypeError, match="ReduceOp"):
                call()

    def test_a_factor_leaves_the_inputs_as_they_are(self) -> None:
        output, array = np.zeros(3), np.ones(3)
        dist.reduce_scatter(output, [array], dist.ReduceOp.PREMUL_SUM(5))
        assert (output == 5).all()
        dist.reduce_scatter_single(output, array, dist.ReduceOp.PREMUL_SUM(7))
        assert (output == 7).all()
        assert (array == 1).all()


# Several ranks


def gather_and_scatter(me: Me) -> None:
    me.init()
    for scale in (1, 20_000):
        of_size(me, scale)
    dist.destroy_process_group()


def of_size(me: Me, scale: int) -> None:
    rank, size, op = me.rank, me.size, dist.ReduceOp
    everyone = range(size)
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    order = [2, 0, 1]
    mine = np.arange(4.0 * scale) + 10 * rank

    def of(number: int) -> Any:
        return np.arange(4.0 * scale) + 10 * number

    # Even and uneven, in the order of the group's ranks, into whatever layout.
    outputs = [np.zeros((4 * scale, 2))[:, 0] for _ in everyone]
    dist.all_gather(outputs, mine)
    assert all((outputs[each] == of(each)).all() for each in everyone)
    dist.all_gather(outputs, mine, group=group)
    assert all((outputs[each] == of(order[each])).all() for each in everyone)
    uneven = [np.zeros(each * scale, int) for each in everyone]
    dist.all_gather_v(uneven, np.full(rank * scale, rank))
    assert [part.tolist() for part in uneven] == [[each] * each * scale for each in everyone]

    # Concatenation and stack; the input may be its place in the output.
    for shape in ((size * 4 * scale,), (size, 4 * scale)):
        together = np.zeros(shape)
        dist.all_gather_single(together, mine)
        assert (together.reshape(size, -1) == [of(each) for each in everyone]).all()
    together = np.zeros((size, 4 * scale))
    together[rank] = mine
    dist.all_gather_into_tensor(together, together[rank])
    assert (together == [of(each) for each in everyone]).all()

    # One rank's lists; roots by global rank, by group rank, or 0.
    for named, root, known in (({}, 0, None), ({"dst": 2}, 2, None), ({"group_dst": 0}, 2, group)):
        outputs = [np.zeros(4 * scale) for _ in everyone]
        lists = outputs if rank == root else (None, [])[rank % 2]
        dist.gather(mine, lists, group=known, **named)
        expected = [of(each) for each in (everyone if known is None else order)]
        assert (np.array(outputs) == (expected if rank == root else 0)).all()
        named = {name.replace("dst", "src"): value for name, value in named.items()}
        got = np.zeros((2, 4 * scale)).T[:, 0]
        lists = [of(each) for each in everyone] if rank == root else (None, [])[rank % 2]
        dist.scatter(got, lists, group=known, **named)
        assert (got == of(rank if known is None else order.index(rank))).all()

    # Reductions: even, uneven, in place.
    total = sum(of(each) for each in everyone)
    output = np.zeros(4 * scale)
    dist.reduce_scatter(output, [mine * (each + 1) for each in everyone])
    assert (output == total * (rank + 1)).all()
    uneven_output = np.zeros(order.index(rank) * scale, int)
    dist.reduce_scatter_v(uneven_output, [np.full(each * scale, rank + each) for each in everyone], op.MAX, group)
    assert uneven_output.tolist() == [2 + order.index(rank)] * order.index(rank) * scale
    for shape in ((size * 4 * scale,), (size, 4 * scale)):
        everything = np.concatenate([mine * (each + 1) for each in everyone]).reshape(shape)
        output = np.zeros(4 * scale)
        dist.reduce_scatter_single(output, everything, op.PREMUL_SUM(2))
        assert (output == 2 * total * (rank + 1)).all()
    share = everything[rank]
    dist.reduce_scatter_tensor(share, everything, op.AVG)
    np.testing.assert_allclose(share, total * (rank + 1) / size)

    # Everyone to everyone: lists of any sizes, and rows.
    inputs = [np.full((each + 1) * scale, 10 * rank + each) for each in everyone]
    outputs = [np.zeros((rank + 1) * scale, int) for _ in everyone]
    dist.all_to_all(outputs, inputs)
    assert [set(output.tolist()) for output in outputs] == [{10 * each + rank} for each in everyone]
    rows = np.arange(size * scale * 2).reshape(-1, 2) + 1000 * rank
    output = np.zeros_like(rows)
    dist.all_to_all_single(output, rows)
    block = rows[rank * scale : (rank + 1) * scale]
    assert (output == np.concatenate([block + 1000 * (each - rank) for each in everyone])).all()
    dist.all_to_all_single(rows, rows)
    assert (rows == output).all(), "in place"
    sends = [[0, 1, 2], [2, 0, 1], [1, 2, 0]][rank]
    receives = [[0, 2, 1], [1, 0, 2], [2, 1, 0]][rank]
    rows = np.full((3 * scale, 2), rank)
    output = np.full((3 * scale, 2), -1)
    dist.all_to_all_single(output, rows, [count * scale for count in receives], [count * scale for count in sends])
    assert output[:, 1].tolist() == [each for each in everyone for _ in range(receives[each] * scale)]

    # Wrong calls are refused at the rank that makes them; the right ones then meet the others'.
    wrong = [
        lambda: dist.all_gather([mine] * 2, mine),
        lambda: dist.all_gather([mine, mine, mine[1:]], mine) if rank == 2 else dist.all_gather(None, mine),
        lambda: dist.gather(mine, None, dst=rank),
        lambda: dist.gather(mine, [mine] * 3, dst=(rank + 1) % 3),
        lambda: dist.scatter(mine, [mine] * 2, src=rank),
        lambda: dist.scatter(mine, [mine] * 3, src=(rank + 1) % 3),
        lambda: dist.scatter(mine, [mine, mine[1:], mine], src=rank),
        lambda: dist.reduce_scatter(mine, [mine] * 4),
        lambda: dist.reduce_scatter_single(mine, mine),
        lambda: dist.all_gather_single(mine, mine),
        lambda: dist.all_to_all([mine] * 3, [mine] * 2),
        lambda: dist.all_to_all_single(mine[:-1], mine),
        lambda: dist.all_to_all_single(np.zeros(3), np.zeros(3), [1, 1, 2], [1, 1, 1]),
    ]
    for call in wrong:
        said = me.attempt(call)
        assert said["error"] in ("ValueError", "TypeError"), said
    array = np.ones(1)
    dist.all_reduce(array)
    assert array == 3

    # What only all ranks together can tell is wrong is told to all.
    for call in (
        lambda: dist.all_to_all([np.zeros(scale + (rank == 1))] * 3, [np.zeros(scale)] * 3),
        lambda: dist.all_gather([np.zeros(scale + (rank == 1))] * 3, np.zeros(scale + (rank == 1))),
        lambda: dist.gather(np.zeros(scale + (rank == 1)), [np.zeros(scale)] * 3 if rank == 0 else None),
        lambda: (
            dist.all_gather([np.zeros(scale, "f4")] * 3, np.zeros(scale, "f4"))
            if rank
            else dist.all_gather([np.zeros(scale)] * 3, np.zeros(scale))
        ),
        lambda: dist.reduce_scatter(np.zeros(scale), [np.zeros(scale)] * 3, op.MAX if rank else op.SUM),
        lambda: dist.scatter(np.zeros(scale), [np.zeros(scale)] * 3, src=rank),
    ):
        assert me.attempt(call)["error"] == "CollectiveMismatchError"
    dist.destroy_process_group(group)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_gathering_and_scattering_of_three_ranks(ranks: Ranks, transport: str) -> None:
    ranks.run(gather_and_scatter, 3, uses=[of_size], env={"RANKMESH_TRANSPORT": transport})
