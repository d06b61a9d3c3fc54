"""The mesh's stores inside torch: the calls that C++ makes, their errors and timeouts, and groups that meet in them."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from support import store_calls
from support.processes import Me, Ranks
from support.store_calls import CALLS, outcome
from torch.distributed.elastic.utils import store as elastic

import rankmesh as ours
from rankmesh.torch import Store
from rankmesh.torch._store import _open_stores

SHORT = timedelta(seconds=0.05)
LONG = timedelta(seconds=30)
DEADLINE = 30.0
KINDS = ("hash", "tcp", "file", "prefix/prefix/hash", "torch/prefix/hash", "torch/torch/file")


def opened(kind: str, folder: Path) -> Any:
    """Return a store of the mesh as torch's, within ours or torch's prefixes; nobody else keeps what is inside."""
    match kind.split("/", 1):
        case ["torch", inner]:
            return theirs.PrefixStore("t", opened(inner, folder))
    return Store(store_calls.opened(ours, kind, folder))


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    """Close the stores that a test has made, which would be kept otherwise."""
    before = set(_open_stores)
    yield
    for store in set(_open_stores) - before:
        store.close()


STORE = {"DistStoreError"}
NOT_A_NUMBER = {"DistStoreError", "ValueError"}
UNSUPPORTED = {"DistStoreError", "NotImplementedError"}
NOT_FORWARDED = {"NotImplementedError"}

DIFFERENCES: list[tuple[str, str, Any, str]] = [
    # kind, call, what ours does, why
    ("", "set under an empty key", STORE, "a key is part of a URL"),
    ("prefix", "set under an empty key", (None, b"v"), "behind a prefix it is not empty"),
    ("torch", "set under an empty key", (None, b"v"), "behind a prefix it is not empty"),
    ("", "add to text", NOT_A_NUMBER, "a ValueError in torch, that and a store's error here"),
    ("", "add to digits and text", NOT_A_NUMBER, "torch takes the digits and drops the rest"),
    ("", "add more than 64 bits", NOT_A_NUMBER, "the key is named"),
    ("torch", "add more than 64 bits", {"TypeError"}, "torch's prefix refuses it"),
    ("", "add over the end", NOT_A_NUMBER, "torch goes on at the other end"),
    ("", "multi_set more values than keys", {"ValueError"}, "torch drops what is too much"),
    ("file", "delete_key", UNSUPPORTED, "the file is only appended to"),
    ("file", "num_keys", (1, None, 1, 3), "the file's users are counted in it"),
    ("tcp", "num_keys", (1, None, 1, 3), "its participants are counted in it"),
    ("file", "has_extended_api", False, "as torch's FileStore"),
    *(
        (kind, call, refused, "no queues in a file, and torch's prefix does not ask for what C++ does not")
        for kind, refused in (("file", UNSUPPORTED), ("torch", NOT_FORWARDED))
        for call in ("queue", "a queue and a value", "pop what is not there", "wait to pop what is not there")
    ),
    ("torch", "list_keys", NOT_FORWARDED, "torch's prefix does not ask for them"),
]
"""Where the outcome is not that of torch's HashStore; of several rows, the last whose kind is in the name counts."""


@pytest.mark.parametrize("call", CALLS)
def test_the_same_call(tmp_path: Path, call: str) -> None:
    torchs = outcome(CALLS[call], theirs.HashStore(), theirs)
    for kind in KINDS:
        rows = [row for row in DIFFERENCES if row[0] in kind and row[1] == call]
        expected, why = rows[-1][2:] if rows else (torchs, "as torch's")
        assert outcome(CALLS[call], opened(kind, tmp_path), theirs) == expected, f"{kind}: {why}"


def test_each_difference_is_one_of_some_call() -> None:
    assert {row[1] for row in DIFFERENCES} <= CALLS.keys()


def test_it_is_one_of_torchs() -> None:
    in_cpp = {"timeout", "set_timeout", "barrier"}  # the last consists of the others
    assert {name for name in dir(theirs.Store) if not name.startswith("_")} <= vars(Store).keys() | in_cpp
    inner = ours.HashStore()
    store = Store(inner)
    assert isinstance(store, theirs.Store)
    assert theirs.PrefixStore("p", store).underlying_store is store
    store.set("k", "v")
    assert inner.get("k") == b"v"
    assert repr(store) == "rankmesh.torch.Store(HashStore())"


def test_other_objects_and_copies() -> None:
    for what, message in (("", "got str"), (theirs.HashStore(), "got HashStore; torch takes its own as they are")):
        with pytest.raises(TypeError, match=f"store must be one of rankmesh's stores, {message}"):
            Store(what)  # type: ignore[arg-type]
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot pickle rankmesh\.torch\.Store"):
            copied(Store(ours.HashStore()))


def test_without_a_store_it_is_the_jobs() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        Store()
    ours.init_process_group(store=Store(ours.HashStore()), rank=0, world_size=1)  # its one rank meets itself there
    try:
        job, store = ours.get_default_store(), Store()
        before = job.timeout
        theirs.PrefixStore("p", store).set("k", "v")
        assert job.get("p/k") == b"v"
        store.set_timeout(SHORT)
        with pytest.raises(theirs.DistStoreError, match="key 'missing' is not set"):
            store.get("missing")
        assert job.timeout == before != SHORT
    finally:
        ours.destroy_process_group()


class TestErrors:
    @pytest.mark.parametrize(("kind", "wait"), list(zip(KINDS, [True, False] * 3, strict=True)))
    def test_a_timeout_is_torchs_and_the_meshs(self, tmp_path, kind, wait):
        store = opened(kind, tmp_path)
        store.set_timeout(SHORT)
        with pytest.raises(theirs.DistStoreError, match=r"waited 0\.05 s, .*missing") as caught:
            store.wait(["missing"]) if wait else store.get("missing")
        assert isinstance(caught.value, ours.errors.StoreTimeoutError)
        assert isinstance(caught.value, TimeoutError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))
        if kind == "hash":
            with pytest.raises(theirs.QueueEmptyError, match="queue 'q' is empty") as caught:
                store.queue_pop("q", block=False)
            assert isinstance(caught.value, ours.QueueEmptyError)

    @pytest.mark.parametrize("through", ["", "torch"])
    def test_the_master_goes(self, through):
        master = ours.TCPStore("127.0.0.1", 0, is_master=True)
        store = Store(ours.TCPStore("127.0.0.1", master.port))
        seen = theirs.PrefixStore("p", store) if through else store
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(seen.wait, ["k"], LONG)
            master.close()
            with pytest.raises(theirs.DistNetworkError) as caught:
                waiting.result(DEADLINE)
        assert isinstance(caught.value, ours.DistNetworkError)

    def test_torchs_own_pass_through(self):
        store = Store(ours.PrefixStore("p", theirs.HashStore()))
        store.set_timeout(SHORT)
        with pytest.raises(theirs.DistStoreError) as caught:
            theirs.PrefixStore("t", store).get("missing")
        assert type(caught.value) is theirs.DistStoreError


class TestTimeout:
    def test_it_is_first_that_of_the_meshs_store_and_then_what_torch_sets_in_cpp(self):
        inner = ours.HashStore()
        inner.set_timeout(7)
        store = Store(inner)
        assert store.timeout == timedelta(seconds=7)
        theirs.PrefixStore("p", store).set_timeout(SHORT)
        assert store.timeout == SHORT
        with pytest.raises(theirs.DistStoreError, match=r"waited 0\.05 s"):
            store.get("missing")
        assert inner.timeout == SHORT

    @pytest.mark.parametrize("call", ["wait", "get", "multi_get", "queue_pop"])
    def test_none_at_all_is_no_end(self, call):
        """timedelta(0), as in torch."""
        inner = ours.HashStore()
        store = Store(inner)
        store.set_timeout(timedelta(0))
        calls = {
            "wait": lambda: store.wait(["k"], timedelta(0)),
            "get": lambda: store.get("k"),
            "multi_get": lambda: store.multi_get(["k"]),
            "queue_pop": lambda: store.queue_pop("k"),
        }
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(calls[call])
            time.sleep(0.05)
            inner.set("k", "v")
            inner.queue_push("k", "v")
            waiting.result(DEADLINE)

    def test_one_that_is_over_is_over_at_once(self):
        """As with torch's HashStore."""
        store = Store(ours.HashStore())
        with pytest.raises(theirs.DistStoreError, match="waited 0 s"):
            theirs.PrefixStore("p", store).wait(["missing"], timedelta(seconds=-1))
        store.set_timeout(timedelta(seconds=-1))
        with pytest.raises(theirs.DistStoreError, match="waited 0 s"):
            store.get("missing")


class TestLife:
    """torch keeps the half that is in C++."""

    def test_it_lives_until_it_is_closed(self):
        inner = ours.HashStore()
        gone = weakref.ref(inner)
        prefixed = theirs.PrefixStore("p", Store(inner))
        del inner
        gc.collect()
        prefixed.set("k", "v")
        clone = prefixed.clone()
        gc.collect()
        assert clone.get("k") == b"v"
        prefixed.underlying_store.close()
        clone.underlying_store.close()
        gc.collect()
        assert gone() is None

    def test_closing_lets_go_of_what_nobody_else_has(self, tmp_path):
        path = tmp_path / "store"
        store, kept = Store(ours.FileStore(str(path), 1)), ours.HashStore()
        another = Store(kept)
        store.close()
        store.close()
        assert not path.exists()
        with pytest.raises(theirs.DistStoreError, match=r"rankmesh\.torch\.Store\(FileStore\(.* is closed"):
            theirs.PrefixStore("p", store).set("k", "v")
        another.close()
        kept.set("k", "v")


class TestThreads:
    def test_torchs_collectives_over_stores(self):
        """In C++, and those of elastic in Python."""
        inner = ours.HashStore()

        def rank(number: int) -> Any:
            store = Store(inner)
            theirs.PrefixStore("c", store).barrier("barrier", 3, LONG)
            elastic.barrier(store, 3, "elastic", DEADLINE)
            return elastic.synchronize(store, b"%d" % number, number, 3, "all", DEADLINE)

        everyone = [b"0", b"1", b"2"]
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(rank, range(3), timeout=DEADLINE)) == [everyone] * 3

    def test_a_peer_does_not_come(self):
        """The error of gloo's start names the key that is missing, rank 1's."""
        with pytest.raises(theirs.DistStoreError, match=r"waited 0\.1 s, .*/0/1'"):
            theirs.init_process_group(
                "gloo", store=Store(ours.HashStore()), rank=0, world_size=2, timeout=timedelta(seconds=0.1)
            )
        assert not theirs.is_initialized()


@pytest.mark.processes
def test_gloo_meets_in_each_kind(ranks: Ranks) -> None:
    with contextlib.closing(ours.TCPStore("127.0.0.1", 0, is_master=True)) as master:
        ranks.run(train, 2, port=master.port)


def train(me: Me, port: int) -> None:
    """Meet in several kinds of store, each given inline and kept by nobody; use groups, and train in one."""
    me.meet("imported")
    me.init()
    stores = {
        "job": lambda: Store(),
        "file": lambda: Store(ours.FileStore(f"{me.folder}/store", me.size)),
        "tcp": lambda: Store(ours.PrefixStore("a", ours.PrefixStore("b", ours.TCPStore("127.0.0.1", port)))),
        "torch's prefix": lambda: theirs.PrefixStore("c", Store()),
    }
    for name, make in stores.items():
        theirs.init_process_group("gloo", store=make(), rank=me.rank, world_size=me.size)
        gc.collect()
        found = torch.tensor([me.rank + 1.0])
        theirs.all_reduce(found)
        pair = theirs.new_group([0, 1])
        theirs.all_reduce(found, group=pair)
        theirs.barrier()
        theirs.monitored_barrier()
        assert found.item() == 6.0, name
        if name == "job":
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=pair)
            model(torch.full((1, 2), me.rank + 1.0)).sum().backward()
            assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
        theirs.destroy_process_group()
    ours.barrier()
