"""Backends: the strings that name them, and engines from outside."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Me, on_ranks

import rankmesh as dist
from rankmesh._session.backend import resolve
from rankmesh_agent.wire.errors import DistBackendError

Backend = dist.Backend


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[dist.Backend]]:
    """Backend; what a test registers is forgotten after it."""
    monkeypatch.setattr(Backend, "_creators", dict(Backend._creators))
    monkeypatch.setattr(Backend, "backend_list", list(Backend.backend_list))
    names = set(vars(Backend))
    yield Backend
    for name in set(vars(Backend)) - names:
        delattr(Backend, name)


def engine(*arguments: Any) -> object:
    """Create an engine that can do nothing."""
    return object()


# Strings


@pytest.mark.parametrize(
    "named",
    [
        None, "mesh", "gloo", "tcp", "MESH", "GLOO", "Tcp", "cpu:gloo", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:mesh",
        "CPU:GLOO,CUDA:NCCL", "cpu:gloo, cuda:nccl", " gloo ", "cuda:gloo", Backend("gloo"), Backend.GLOO,
    ],
)  # fmt: skip
def test_what_means_the_mesh(named: str | None) -> None:
    assert resolve(named).host == "mesh"
    assert resolve(named).name == "mesh"


@pytest.mark.parametrize(
    ("named", "device"),
    [
        (None, "auto"),
        ("cpu:gloo", "auto"),
        ("gloo", "host"),
        ("cuda:gloo", "host"),
        ("cpu:gloo,cuda:gloo", "host"),
        ("cpu:gloo,cuda:nccl", "nccl"),
    ],
)
def test_what_carries_arrays_on_gpus(named: str | None, device: str) -> None:
    assert resolve(named).device == device


NOT_READ = "cannot be read: write a name, or 'cpu:name,cuda:name'"
NOT_KNOWN = r"is not known: use 'mesh', 'gloo', 'tcp', 'nccl', 'mpi', or register it with Backend"
ABSENT = r"is not available: .*'gloo'.*available are 'mesh', 'gloo', 'tcp'"
NO_STRING = "a backend is named by a string, got"
REFUSED: list[tuple[list[Any], type[Exception], str]] = [
    (["", "cpu:", ":gloo", "cpu:gloo,", "cpu:gloo,cpu:tcp", "cpu:x:gloo", ":", "a:b,c"], ValueError, NOT_READ),
    (
        ["smoke-signals", "cpu", "undefined", "cpu:smoke", "cpu:gloo,cuda:smoke", "gloo,nccl", ","],
        ValueError,
        NOT_KNOWN,
    ),
    (
        ["ucc", "xccl", "XCCL", "cpu:ucc", "cuda:xccl", "cpu:gloo,cuda:ucc", "cpu:ucc,cuda:nccl"],
        DistBackendError,
        ABSENT,
    ),
    (["cpu:nccl", "cpu:nccl,cuda:nccl"], ValueError, "nccl is for arrays on GPUs, as in 'cpu:gloo,cuda:nccl'"),
    ([5, b"gloo", ["gloo"], object()], ValueError, NO_STRING),
]


@pytest.mark.parametrize(
    ("named", "error", "text"), [(named, error, text) for names, error, text in REFUSED for named in names]
)
def test_a_backend_that_cannot_be_used_is_refused(named: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        resolve(named)
    if text in (NOT_READ, NO_STRING):
        with pytest.raises(error, match=text):
            dist.is_backend_available(named)
    elif text in (NOT_KNOWN, ABSENT):
        assert dist.is_backend_available(named) is False
    if text is NO_STRING:
        with pytest.raises(error, match=text):
            Backend(named)


@pytest.mark.parametrize(
    ("named", "name", "package"),
    [(named, "nccl", "CuPy") for named in ("nccl", "NCCL", "cuda:nccl")]
    + [(named, "mpi", "mpi4py") for named in ("mpi", "MPI", "cpu:mpi", "cpu:mpi,cuda:nccl")],
)
def test_a_backend_without_its_package_says_how_to_install_it(
    named: str, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DistBackendError, match=f"'{name}' is not available: {package} is not installed: pip install"):
        resolve(named)
    assert getattr(dist, f"is_{name}_available")() is False


@pytest.mark.parametrize("named", ["cuda:mpi", "cpu:gloo,cuda:mpi"])
def test_mpi_for_gpus_is_mpi_for_all(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmesh_agent.mpi.unavailable_reason", lambda: "")
    with pytest.raises(ValueError, match="arrays on GPUs can go over MPI where all do: 'cpu:mpi,cuda:mpi'"):
        resolve(named)


def test_backends_are_strings_in_lower_case() -> None:
    assert Backend("GLOO") == Backend.GLOO == "gloo"
    assert Backend("Own") == "own"
    assert isinstance(Backend("gloo"), str)
    assert f"{Backend('gloo')}" == "gloo"
    assert repr(Backend("gloo")) == "'gloo'"
    assert {Backend("gloo"): 1}["gloo"] == 1
    assert pickle.loads(pickle.dumps(Backend("GLOO"))) == "gloo"
    assert [getattr(Backend, name) for name in ("UNDEFINED", "MESH", "NCCL", "UCC", "MPI", "XCCL")] == [
        "undefined", "mesh", "nccl", "ucc", "mpi", "xccl",
    ]  # fmt: skip
    assert set(Backend.backend_list) >= {"undefined", "mesh", "gloo", "nccl", "ucc", "mpi"}


def test_what_is_available() -> None:
    assert dist.is_available()
    assert dist.is_gloo_available()
    assert dist.is_ucc_available() is False
    assert dist.is_xccl_available() is False
    for ask, name in ((dist.is_nccl_available, "nccl"), (dist.is_mpi_available, "mpi")):
        assert ask() is dist.is_backend_available(name)
    assert dist.is_backend_available("gloo")
    assert dist.is_backend_available("cpu:gloo")
    assert dist.is_backend_available("cpu:gloo,cuda:nccl") is dist.is_nccl_available()
    assert not dist.is_backend_available("cpu:gloo,cuda:ucc"), "not all of it"


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "mesh"), ("cpu:0", "mesh"), ("cuda", "nccl"), ("cuda:1", "nccl")]
)
def test_the_backend_for_a_device(device: str, backend: str) -> None:
    assert dist.get_default_backend_for_device(device) == backend


@pytest.mark.parametrize("device", ["xpu", "tpu", "", None])
def test_devices_without_a_backend(device: Any) -> None:
    with pytest.raises(ValueError, match="there is no backend for device"):
        dist.get_default_backend_for_device(device)


def test_torchelastic_is_known_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert dist.is_torchelastic_launched() is False
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert dist.is_torchelastic_launched() is True


# Registering


def test_a_registered_name_is_known_everywhere(registry: type[dist.Backend]) -> None:
    registry.register_backend("Carrier_Pigeon", engine)
    assert registry.CARRIER_PIGEON == "carrier_pigeon"  # type: ignore[attr-defined]
    assert "carrier_pigeon" in registry.backend_list
    assert dist.is_backend_available("CARRIER_PIGEON")
    assert dist.is_backend_available("cpu:carrier_pigeon")
    for named in ("carrier_pigeon", "Carrier_Pigeon", "cpu:carrier_pigeon,cuda:nccl", registry("carrier_pigeon")):
        assert resolve(named).host == resolve(named).name == "carrier_pigeon"
    with pytest.raises(ValueError, match="use 'mesh', 'gloo', 'tcp', 'nccl', 'mpi', 'carrier_pigeon'"):
        resolve("dove")
    with pytest.raises(RuntimeError, match="there is a backend 'carrier_pigeon' already"):
        registry.register_backend("Carrier_Pigeon", engine)


@pytest.mark.parametrize("devices", [None, "cpu", ["cpu"], ("cpu", "cuda")])
def test_engines_are_for_the_cpu(registry: type[dist.Backend], devices: Any) -> None:
    registry.register_backend("pigeon", engine, devices=devices)
    assert resolve("pigeon").host == "pigeon"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("gloo", engine), RuntimeError, "there is a backend 'gloo' already"),
        (("TCP", engine), RuntimeError, "there is a backend 'tcp' already"),
        (("nccl", engine), RuntimeError, "there is a backend 'nccl' already"),
        (("undefined", engine), RuntimeError, "already"),
        (("pigeon", "function"), TypeError, "func must be callable"),
        (("pigeon", None), TypeError, "func must be callable"),
        (("two pigeons", engine), ValueError, "must be an identifier"),
        (("cpu:pigeon", engine), ValueError, "must be an identifier"),
        (("", engine), ValueError, "must be an identifier"),
        ((5, engine), ValueError, "named by a string"),
        (("pigeon", engine, False, "cuda"), ValueError, "only engines for 'cpu'"),
        (("pigeon", engine, False, ["cuda", "xpu"]), ValueError, "only engines for 'cpu'"),
    ],
)
def test_what_cannot_be_registered(
    registry: type[dist.Backend], arguments: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        registry.register_backend(*arguments)
    assert not registry._creators
    assert not hasattr(registry, "PIGEON")


@pytest.mark.parametrize("extended_api", [False, True])
def test_an_engine_of_one_rank_is_made_used_and_closed(
    registry: type[dist.Backend], tmp_path: Path, extended_api: bool
) -> None:
    done: list[Any] = []

    class Doubling:
        def all_reduce(self, array: np.ndarray[Any, Any], op: dist.ReduceOp) -> None:
            array *= 2

        def close(self) -> None:
            done.append("closed")

    def create(*arguments: Any) -> Doubling:
        done.append(arguments)
        return Doubling()

    registry.register_backend("doubling", create, extended_api=extended_api)
    dist.init_process_group(
        "doubling", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, pg_options={"a": 1}
    )
    try:
        (made,) = done
        if extended_api:
            options, pg_options = made
            assert options[1:3] == (0, 1)
            assert options.global_ranks_in_group == [0]
            assert options.group_id == "world"
            assert pg_options == {"a": 1}
            store = options.store
        else:
            store, rank, size, timeout = made
            assert (rank, size, timeout) == (0, 1, dist.default_pg_timeout)
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert dist.get_backend() == "doubling"
        assert dist.get_backend_config() == "cpu:doubling,cuda:doubling"
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.name() == "doubling"
        array = np.ones((2, 2)).T
        dist.all_reduce(array)
        assert (array == 2).all()
    finally:
        dist.destroy_process_group()
    assert done[1:] == ["closed"]


# Several ranks


class StoreEngine:
    """Collectives in plain Python over a store: what a third party might write."""

    made: list[Any] = []  # noqa: RUF012

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.step, self.closed = 0, False
        self.made.append(self)

    def swap(self, data: bytes) -> list[bytes]:
        self.step += 1
        self.store.set(f"{self.step}/{self.rank}", data)
        return [self.store.get(f"{self.step}/{each}") for each in range(self.size)]

    def all_reduce(self, array: Any, op: Any) -> None:
        parts = [np.frombuffer(part, array.dtype) for part in self.swap(array.tobytes())]
        array[:] = {"SUM": np.sum, "MAX": np.max}[op.name](parts, axis=0)

    def broadcast(self, array: Any, root: int) -> None:
        array[:] = np.frombuffer(self.swap(array.tobytes() if self.rank == root else b"")[root], array.dtype)

    def all_gather(self, outputs: Any, array: Any) -> None:
        for output, part in zip(outputs, self.swap(array.tobytes()), strict=True):
            output[:] = np.frombuffer(part, output.dtype)

    def barrier(self) -> None:
        self.swap(b"")

    def close(self) -> None:
        self.closed = True


@on_ranks(3)
def test_an_engine_over_the_groups_store(me: Me) -> None:
    options = []

    def create(of: Any, pg_options: Any) -> Any:
        options.append((of, pg_options))
        return StoreEngine(of.store, of.group_rank, of.group_size, of.timeout)

    dist.Backend.register_backend("plain", StoreEngine)
    dist.Backend.register_backend("extended", create, extended_api=True)
    me.init(backend="cpu:plain,cuda:nccl", timeout=60)
    rank, engine = me.rank, StoreEngine.made[0]
    assert (engine.rank, engine.size, engine.timeout.total_seconds()) == (rank, 3, 60)
    assert dist.get_backend() == "plain"
    array = np.full((3, 2), rank + 1.0).T
    dist.all_reduce(array)
    assert (array == 6).all()
    works = [dist.all_reduce(np.full(2, number + rank), dist.ReduceOp.MAX, async_op=True) for number in range(5)]
    for number, work in enumerate(works):
        work.wait()
        assert (work.result()[0] == number + 2).all()
    step = engine.step
    arrays = [np.full(count, rank + 1.0) for count in (1, 0, 3)]
    with dist.batch():
        for array in arrays:
            dist.all_reduce(array)
    assert engine.step == step + 1
    assert all((array == 6).all() for array in arrays)
    objects = [None] * 3
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == [0, 1, 2]
    # Calls that do not fit together never reach the engine; neither does what it lacks. The group goes on.
    step = engine.step
    reported = me.attempt(dist.all_reduce, np.ones(2 + (rank == 1)))
    assert reported["error"] == "CollectiveMismatchError", reported
    assert "rank 1: all_reduce(float64[3], SUM)" in reported["text"]
    reported = me.attempt(dist.reduce, np.ones(2), 0)
    assert reported["error"] == "DistBackendError", reported
    assert "backend 'plain' does not offer reduce" in reported["text"]
    assert engine.step == step
    dist.barrier()
    # Messages go over the mesh.
    if rank == 0:
        dist.send(np.ones(3), 1)
    elif rank == 1:
        got = np.zeros(3)
        assert dist.recv(got, 0) == 0
        assert got.all()
    # Groups: the world's backend, another, one with options; a split and a shrunken one have their parent's.
    group = dist.new_group([2, 0], sort_ranks=False, timeout=7)
    if rank != 1:
        engine = StoreEngine.made[1]
        assert (engine.rank, engine.size, engine.timeout.total_seconds()) == ((2 - rank) // 2, 2, 7)
        array = np.array([rank])
        dist.broadcast(array, src=2, group=group)
        assert array[0] == 2
        dist.destroy_process_group(group)
        assert engine.closed
    mesh = dist.new_group(backend="gloo")
    assert dist.get_backend(mesh) == "mesh"
    dist.reduce(np.ones(1), 0, group=mesh)
    special = dist.new_group([0, 2, 1], sort_ranks=False, backend="extended", pg_options={"speed": 1})
    ((of, pg_options),) = options
    assert pg_options == {"speed": 1}
    assert (of.group_rank, of.group_size, of.global_ranks_in_group) == ([0, 2, 1].index(rank), 3, [0, 2, 1])
    assert of.group_id == special.group_name
    split = dist.split_group(special, [[0, 2]])
    assert (split is None) == (rank == 2)
    if split is not None:
        assert dist.get_backend(split) == "extended"
        assert options[-1][0].global_ranks_in_group == [0, 1]
        dist.barrier(split)
    dist.barrier()
    if rank == 2:
        me.wait_for("shrunk-0", "shrunk-1")
        return
    dist.shrink_group([2])
    assert dist.get_backend() == "plain"
    assert StoreEngine.made[-1].size == 2
    array = np.ones(1)
    dist.all_reduce(array)
    assert array[0] == 2
    me.mark(f"shrunk-{rank}")
    me.wait_for("shrunk-0", "shrunk-1")  # the engine reads from the store, which rank 0 takes with it
    dist.destroy_process_group()
    assert all(engine.closed for engine in StoreEngine.made)


@on_ranks(3)
def test_an_engine_of_a_world_that_grows(me: Me) -> None:
    dist.Backend.register_backend("plain", StoreEngine)
    if me.rank == 2:
        me.join(backend="plain")
    else:
        me.init(world_size=2, backend="plain")
        dist.barrier()
        dist.grow_group(3)
        assert StoreEngine.made[0].closed
    engine = StoreEngine.made[-1]
    assert (engine.rank, engine.size, engine.closed) == (me.rank, 3, False)
    array = np.ones(1)
    dist.all_reduce(array)
    assert array[0] == 3
    me.meet("over")  # the engine reads from the store, which rank 0 takes with it
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [True, False], ids=["world", "group"])
@on_ranks(3)
def test_an_engine_that_cannot_be_made_on_one_rank_is_told_to_the_others(me: Me, world: bool) -> None:
    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        store.set(f"here-{rank}", b"")
        if rank == 1:
            raise OSError("no pigeons left")
        store.get("here-1")
        return StoreEngine(store, rank, size, timeout)

    dist.Backend.register_backend("pigeon", create)
    before = me.resources() if world else None
    make = (lambda: me.init(backend="pigeon", timeout=60)) if world else (lambda: dist.new_group(backend="pigeon"))
    if not world:
        me.init()
        dist.barrier()
    made = me.attempt(make)
    assert made["error"] == ("OSError" if me.rank == 1 else None), made
    me.meet("made")  # rank 0 has the store: it must not leave while others still make theirs
    if world and me.rank == 1:
        assert not dist.is_initialized()
        after = me.resources()
        assert after[0] == before[0], after
    elif world:
        reported = me.attempt(dist.barrier)
        assert reported["error"] in ("GroupAbortedError", "RankFailedError"), reported
        assert "no pigeons left" in reported["text"], reported
        assert reported["ranks"] == [1]
        dist.destroy_process_group()
    else:
        dist.barrier()  # the world is none the worse
        assert dist.get_pg_count() == (1 if me.rank == 1 else 2)
        dist.destroy_process_group()


@on_ranks(2)
def test_a_creator_waits_no_longer_than_the_groups_timeout(me: Me) -> None:
    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        if rank == 1:
            raise OSError("no pigeons left")
        store.get("address-1")

    dist.Backend.register_backend("pigeon", create)
    me.init()
    me.meet("joined")  # the limit is that of the ranks' meeting in the call, too
    reported = me.attempt(dist.new_group, backend="pigeon", timeout=4)
    assert reported["error"] == ("OSError" if me.rank == 1 else "StoreTimeoutError"), reported
    assert reported["seconds"] < 30, reported
    dist.barrier()
    assert dist.get_pg_count() == 1
    dist.destroy_process_group()
