"""The calls that stores of ours and of torch's are compared by, and what came of each."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

LONG, SHORT, SHORTER = timedelta(seconds=60), timedelta(seconds=0.1), timedelta(seconds=0.05)
KINDS = ("tcp", "hash", "file", "prefix/hash", "prefix/file")
ERRORS = {"TypeError", "ValueError", "NotImplementedError", "DistNetworkError", "DistStoreError", "QueueEmptyError"}


def opened(module: ModuleType, kind: str, folder: Path) -> Any:
    """Return a new store of a kind that is RankMesh's or torch's."""
    match kind.split("/", 1):
        case ["prefix", inner]:
            return module.PrefixStore("p", opened(module, inner, folder))
        case ["tcp"]:
            return module.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30))
        case ["file"]:
            return module.FileStore(f"{folder}/{next(_number)}", 1)
    return module.HashStore()


_number = itertools.count()


def outcome(call: Callable[[Any], Any], store: Any, module: ModuleType) -> Any:
    """Return what a call returns, or the kinds of error by which a program that imports ``module`` would catch it."""
    store.set_timeout(SHORT)
    try:
        return call(store)
    except (RuntimeError, TypeError, ValueError) as error:
        return {kind for kind in ERRORS if isinstance(error, getattr(module, kind, getattr(builtins, kind, ())))}


def queue(store: Any) -> None:
    store.queue_push("q", "1")
    store.queue_push("q", b"\xff")


def clone(store: Any) -> Any:
    """Return a clone, which connects anew: that may take longer than SHORT on a busy machine."""
    store.set_timeout(LONG)
    return store.clone()


CALLS: dict[str, Callable[[Any], Any]] = {
    "get": lambda s: (s.set("k", "v"), s.get("k")),
    "set bytes": lambda s: (s.set("k", b"\x00\xff"), s.get("k")),
    "set a bytearray": lambda s: (s.set("k", bytearray(b"v")), s.get("k")),
    "set under a bytes key": lambda s: (s.set(b"k", "v"), s.get("k")),
    "set nothing": lambda s: (s.set("k", ""), s.get("k")),
    "set anew": lambda s: (s.set("k", "1"), s.set("k", "2"), s.get("k")),
    "set under an empty key": lambda s: (s.set("", "v"), s.get("")),
    "set under a long key": lambda s: (s.set("k" * 8000, "v"), s.get("k" * 8000)),
    "set None": lambda s: s.set("k", None),
    "set a number": lambda s: s.set("k", 1),
    "set under a number": lambda s: s.set(1, "v"),
    "set without a value": lambda s: s.set("k"),
    "get what is missing": lambda s: s.get("missing"),
    "wait": lambda s: (s.set("k", ""), s.wait(["k"]), s.wait(["k"], SHORT)),
    "wait for nothing": lambda s: s.wait([]),
    "wait for a text": lambda s: s.wait("k"),
    "wait for what is missing": lambda s: s.wait(["missing"]),
    "wait a while for what is missing": lambda s: s.wait(["missing"], SHORTER),
    "wait some seconds for what is missing": lambda s: s.wait(["missing"], 0.05),
    "add": lambda s: (s.add("n", 1), s.add("n", 6), s.get("n")),
    "add less than nothing": lambda s: (s.add("n", -5), s.get("n")),
    "add to digits": lambda s: (s.set("n", "41"), s.add("n", 1)),
    "add to nothing": lambda s: (s.set("n", ""), s.add("n", 5), s.get("n")),
    "add to text": lambda s: (s.set("k", "text"), s.add("k", 1)),
    "add to digits and text": lambda s: (s.set("k", "41x"), s.add("k", 1)),
    "add True": lambda s: s.add("n", True),
    "add a float": lambda s: s.add("n", 1.5),
    "add more than 64 bits": lambda s: s.add("n", 1 << 64),
    "add over the end": lambda s: (s.add("n", (1 << 63) - 1), s.add("n", 1)),
    "compare_set": lambda s: (
        *(s.compare_set("k", "x", "1"), s.check(["k"]), s.compare_set("k", "", "1"), s.compare_set("k", "", "2")),
        *(s.compare_set("k", "x", "2"), s.compare_set("k", "1", b"\xff"), s.get("k")),
    ),
    "compare_set of nothing": lambda s: (s.set("k", ""), s.compare_set("k", "", "1")),
    "append": lambda s: (s.append("k", "1"), s.append("k", "2"), s.get("k")),
    "check": lambda s: (s.set("k", ""), s.check(["k"]), s.check(["k", "missing"]), s.check([])),
    "check a text": lambda s: s.check("k"),
    "multi": lambda s: (s.multi_set(["a", "b"], ["1", "2"]), s.multi_get(["b", "a", "b"]), s.multi_get([])),
    "multi_get what is missing": lambda s: (s.set("k", ""), s.multi_get(["k", "missing"])),
    "multi_set more values than keys": lambda s: s.multi_set(["a"], ["1", "2"]),
    "num_keys": lambda s: (s.num_keys(), s.set("a", ""), s.add("b", 1), s.num_keys()),
    "list_keys": lambda s: (s.set("a", ""), s.set("b/c", ""), sorted(s.list_keys())),
    "delete_key": lambda s: (s.set("k", "v"), s.delete_key("k"), s.delete_key("k"), s.check(["k"])),
    "queue": lambda s: (
        *(queue(s), s.queue_len("q"), s.queue_pop("q"), s.queue_pop("q", False), s.queue_len("q")),
        s.queue_len("another"),
    ),
    "a queue and a value": lambda s: (
        *(queue(s), s.set("q", "v"), s.get("q"), s.delete_key("q"), s.queue_len("q"), s.check(["q"])),
    ),
    "pop what is not there": lambda s: s.queue_pop("q", block=False),
    "wait to pop what is not there": lambda s: s.queue_pop("q"),
    "timeout": lambda s: s.timeout,
    "set_timeout": lambda s: (s.set_timeout(timedelta(seconds=7)), s.timeout),
    "set_timeout in seconds": lambda s: (s.set_timeout(1.5), s.timeout),
    "set_timeout in whole seconds": lambda s: (s.set_timeout(2), s.timeout),
    "set_timeout to None": lambda s: s.set_timeout(None),
    "has_extended_api": lambda s: s.has_extended_api(),
    "barrier": lambda s: s.barrier("meet", 1),
    "barrier that no one else enters": lambda s: s.barrier("meet", 2, SHORTER),
    "clone": lambda s: (s.set("k", "v"), clone(s).get("k")),
    "clone's timeout": lambda s: clone(s).timeout,
}
