"""What is pickled, where, and what a receiver that must not unpickle does."""

from __future__ import annotations

import collections
import enum
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankmesh as dist
from rankmesh._collectives import plain
from rankmesh._collectives.serialize import Message, dumps, loads
from rankmesh._tensors.layout import type_name


class Colour(enum.Enum):
    RED = 1


class Model:
    def __init__(self, weights: Any) -> None:
        self.weights = weights


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("not today")


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "x")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Begins a world of one rank with a token and a setting."""

    def begin(token: str, setting: str) -> None:
        monkeypatch.setenv("RANKMESH_TOKEN", token)
        monkeypatch.setenv("RANKMESH_PICKLE", setting)
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


NOT_ALLOWED = [("", "", "set RANKMESH_TOKEN"), ("secret", "never", "RANKMESH_PICKLE=never"), ("", "never", "=never")]


def again(obj: Any) -> Any:
    data, apart, pickled = dumps(obj, "obj")
    return loads(Message(data, [octets.copy() for octets in apart], pickled))


def test_with_a_token_everything_that_pickles_comes_back(world: Any) -> None:
    world("secret", "")
    ordered = collections.OrderedDict(b=1, a=2)
    for obj in (
        Colour.RED,
        len,
        Model,
        ordered,
        Path("/x"),
        np.dtype("f4"),
        {1: {Colour.RED}},
    ):
        got = again(obj)
        assert got == obj
        assert type(got) is type(obj)
    assert list(again(ordered)) == ["b", "a"]
    assert np.array_equal(again(np.array([{}, None], object)), [{}, None])
    assert again(Model(np.arange(3))).weights.tolist() == [0, 1, 2]


def test_large_arrays_travel_apart_and_are_not_copied(world: Any) -> None:
    weights = np.arange(100_000.0)
    for token in ("secret", ""):
        world(token, "")
        data, apart, pickled = dumps([weights, {"small": np.arange(3)}], "obj")
        assert pickled is bool(token)
        assert len(data) < 1000
        assert np.shares_memory(apart[0], weights)
        got, small = loads(Message(data, arrived := [octets.copy() for octets in apart], pickled))
        assert np.shares_memory(got, arrived[0])
        assert got.tobytes() == weights.tobytes()
        assert small["small"].tolist() == [0, 1, 2]


def test_only_sixteen_arrays_of_a_message_travel_apart(world: Any) -> None:
    weights = [np.full(10_000, number) for number in range(20)]
    for token in ("secret", ""):
        world(token, "")
        assert len(dumps(weights, "obj").apart) == 16
        assert [array.mean() for array in again(weights)] == list(range(20))


def test_every_array_that_arrives_can_be_written_to(world: Any) -> None:
    fixed = np.arange(10_000.0)
    fixed.flags.writeable = False
    for token in ("secret", ""):
        world(token, "")
        for array in again([fixed, fixed[:3], np.broadcast_to(1.0, 9), np.ones((2, 5000), order="F")]):
            array[...] = 1


def test_identity_and_depth_survive_a_pickle(world: Any) -> None:
    world("secret", "")
    shared = [1]
    one, two = again([shared, {"again": shared}])
    assert one is two["again"]
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    assert again(deep) == deep


def test_plain_data_needs_no_token(world: Any) -> None:
    for token, setting, _ in NOT_ALLOWED:
        world(token, setting)
        assert again({"a": [1, (2.5, {3}), np.float32(4)]}) == {"a": [1, (2.5, {3}), np.float32(4)]}


@pytest.mark.parametrize(("token", "setting", "says"), NOT_ALLOWED)
def test_where_it_is_not_allowed_nothing_is_pickled(world: Any, token: str, setting: str, says: str) -> None:
    world(token, setting)
    objects = [1, 2, {"model": Model(3)}]
    with pytest.raises(TypeError, match=re.escape("objects[2]['model'] is a ")) as caught:
        dumps(objects, "objects")
    assert f"{Model.__module__}.Model, which is not plain data" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(("token", "setting", "says"), NOT_ALLOWED)
def test_where_it_is_not_allowed_nothing_is_unpickled(
    world: Any, tmp_path: Path, token: str, setting: str, says: str
) -> None:
    path = tmp_path / "hostile"
    world("secret", "")
    hostile = dumps([1, {"x": Touch(path)}], "obj")
    world(token, setting)
    with pytest.raises(dist.errors.ProtocolError, match=f"a pickled object arrived and was not read; .*{says}"):
        loads(hostile)
    assert not path.exists()
    world("secret", "")
    loads(hostile)[1]["x"].close()
    assert path.exists(), "the payload does what the test thinks it does"


@pytest.mark.parametrize(
    "obj", [lambda: 1, threading.Lock(), Stubborn(), (each for each in ())], ids=lambda obj: type(obj).__name__
)
def test_an_object_that_cannot_be_pickled_raises_pickles_error_with_its_position(world: Any, obj: Any) -> None:
    world("secret", "")
    with pytest.raises(Exception) as pickles:  # noqa: PT011
        pickle.dumps(obj)
    with pytest.raises(pickles.type, match=re.escape(str(pickles.value))) as ours:
        dumps([0, obj], "obj")
    assert ours.value.__notes__ == [f"obj[1] is a {type_name(obj)}, which is not plain data and cannot be pickled"]


def test_an_object_that_contains_itself_is_pickled_where_that_is_allowed(world: Any) -> None:
    loop: list[Any] = [np.arange(3)]
    loop.append({"loop": loop})
    world("secret", "")
    got = again(["first", loop])
    assert got[1][1]["loop"] is got[1]
    assert got[1][0].tolist() == [0, 1, 2]
    world("", "")
    with pytest.raises(ValueError, match=r"obj\[1\]\[1\]\['loop'\] contains itself; .*set RANKMESH_TOKEN"):
        dumps(["first", loop], "obj")


def test_what_is_nested_too_deep_is_named(world: Any) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    world("secret", "")
    with pytest.raises(RecursionError) as caught:
        dumps(deep, "obj")
    assert caught.value.__notes__ == ["obj is nested too deep to be pickled"]
    world("", "")
    with pytest.raises(ValueError, match=r"obj is nested too deep for plain data; .*set RANKMESH_TOKEN"):
        dumps(deep, "obj")


@pytest.mark.parametrize(
    ("obj", "where"),
    [
        (object(), "objects is a"),
        ([0, 0, {"model": object()}], "objects[2]['model'] is a"),
        ({"a": (1, [object()])}, "objects['a'][1][0] is a"),
        ([1, {(1, 2): {3: object()}}], "objects[1][<tuple>][3] is a"),
        ({b"k": {Colour.RED}}, "objects[b'k']{<Colour>} is a"),
        ({1 << 99: {None: {"x" * 99: object()}}}, f"objects[<int>][None]['{'x' * 37}'...] is a"),
        ([[[1], [2]], [[3], object()]], "objects[1][1] is a"),
        ({"k": {object(): 1}}, "objects['k'][<object>] is a"),
    ],
)
def test_the_error_says_where(world: Any, obj: Any, where: str) -> None:
    world("", "")
    with pytest.raises(TypeError, match=f"^{re.escape(where)} "):
        dumps(obj, "objects")


def test_a_tensor_for_a_receiver_without_torch(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="torch is not installed here; send NumPy arrays"):
        plain.tensor_of("torch.float32", False, [2], np.zeros(8, np.uint8))
