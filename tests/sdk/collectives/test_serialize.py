"""What is pickled, where, and what a receiver that must not unpickle does."""

from __future__ import annotations

import collections
import enum
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankmesh as dist
from rankmesh._collectives import codec
from rankmesh._collectives.serialize import dumps, loads
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
    return loads(memoryview(bytearray(dumps(obj, "obj"))))


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


def test_only_what_needs_it_is_pickled(world: Any) -> None:
    world("secret", "authenticated")
    weights = np.arange(100_000.0)
    data = dumps([weights, {"colour": Colour.RED}], "obj")
    pickled = pickle.dumps(Colour.RED, 5)
    assert data.count(b"pickle") == 1
    assert pickled in data
    assert len(data) < weights.nbytes + len(pickled) + 100
    array, rest = loads(memoryview(bytearray(data)))
    assert array.tobytes() == weights.tobytes()
    assert rest == {"colour": Colour.RED}


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
    with pytest.raises(dist.ProtocolError, match=f"a pickled object arrived and was not read; .*{says}"):
        loads(memoryview(hostile))
    assert not path.exists()
    world("secret", "")
    loads(memoryview(hostile))[1]["x"].close()
    assert path.exists(), "the payload does what the test thinks it does"


def test_a_pickle_by_another_name_is_refused(world: Any) -> None:
    world("secret", "")
    for name in ("Pickle", "pickle.loads", "", "torch"):
        data = codec.encode(print, extend=lambda obj, where, name=name: (name, b"N."))
        with pytest.raises(dist.ProtocolError, match="not known here"):
            loads(memoryview(data))
    for what in ("text", 3, [b"N."], bytearray(b"N.")):
        data = codec.encode(print, extend=lambda obj, where, what=what: ("pickle", what))
        with pytest.raises(dist.ProtocolError, match="not known here"):
            loads(memoryview(data))


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
    got = loads(memoryview(dumps(["first", loop], "obj")))
    assert got[1][1]["loop"] is got[1]
    assert got[1][0].tolist() == [0, 1, 2]
    world("", "")
    with pytest.raises(ValueError, match=r"obj\[1\]\[1\]\['loop'\] contains itself; .*set RANKMESH_TOKEN"):
        dumps(["first", loop], "obj")


def test_a_pickled_object_that_occurs_twice_is_one_object(world: Any) -> None:
    world("secret", "")
    one, two = loads(memoryview(dumps([shared := Fraction(1, 3), {"again": shared}], "obj")))
    assert one is two["again"]


def test_a_tensor_for_a_receiver_without_torch(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world("secret", "")
    tensor = ("torch.float32", False, np.zeros(2, np.float32))
    data = codec.encode(print, extend=lambda obj, where: ("torch.Tensor", tensor))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="torch is not installed here; send NumPy arrays"):
        loads(memoryview(data))
