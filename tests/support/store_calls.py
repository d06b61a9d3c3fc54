"""The calls that stores of ours and of torch's are compared by, and what came of each."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

SHORT = timedelta(seconds=0.2)
ERRORS = {"TypeError", "ValueError", "NotImplementedError", "DistNetworkError", "DistStoreError", "QueueEmptyError"}


def outcome(call: Callable[[Any], Any], store: Any, module: ModuleType, timeout: timedelta = SHORT) -> Any:
    """Return what a call returns, or the kinds of error by which a program that imports ``module`` would catch it."""
    store.set_timeout(timeout)
    try:
        return call(store)
    except (RuntimeError, TypeError, ValueError) as error:
        return {kind for kind in ERRORS if isinstance(error, getattr(module, kind, getattr(builtins, kind, ())))}


def both(*calls: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Do one call after the other; return what they return."""
    return lambda store: tuple(call(store) for call in calls)


def after(*calls: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Do one call after the other; return what the last one returns."""
    return lambda store: [call(store) for call in calls][-1]


def queue(*calls: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return after(lambda store: store.queue_push("q", "1"), lambda store: store.queue_push("q", b"\xff"), both(*calls))


CALLS: dict[str, Callable[[Any], Any]] = {
    "set": lambda store: store.set("k", "v"),
    "get": after(lambda store: store.set("k", "v"), lambda store: store.get("k")),
    "set bytes": after(lambda store: store.set("k", b"\x00\xff"), lambda store: store.get("k")),
    "set a bytearray": after(lambda store: store.set("k", bytearray(b"v")), lambda store: store.get("k")),
    "set under a bytes key": after(lambda store: store.set(b"k", "v"), lambda store: store.get("k")),
    "set nothing": after(lambda store: store.set("k", ""), lambda store: store.get("k")),
    "set anew": after(
        lambda store: store.set("k", "1"), lambda store: store.set("k", "2"), lambda store: store.get("k")
    ),
    "set under an empty key": after(lambda store: store.set("", "v"), lambda store: store.get("")),
    "set None": lambda store: store.set("k", None),
    "set a number": lambda store: store.set("k", 1),
    "set under a number": lambda store: store.set(1, "v"),
    "set without a value": lambda store: store.set("k"),
    "get what is missing": lambda store: store.get("missing"),
    "wait": after(lambda store: store.set("k", ""), lambda store: store.wait(["k"])),
    "wait a while": after(lambda store: store.set("k", ""), lambda store: store.wait(["k"], SHORT)),
    "wait for nothing": lambda store: store.wait([]),
    "wait for a text": lambda store: store.wait("k"),
    "wait for what is missing": lambda store: store.wait(["missing"]),
    "wait a while for what is missing": lambda store: store.wait(["missing"], timedelta(seconds=0.05)),
    "wait some seconds for what is missing": lambda store: store.wait(["missing"], 0.05),
    "add": both(lambda store: store.add("n", 1), lambda store: store.add("n", 6), lambda store: store.get("n")),
    "add less than nothing": both(lambda store: store.add("n", -5), lambda store: store.get("n")),
    "add to digits": after(lambda store: store.set("n", "41"), lambda store: store.add("n", 1)),
    "add to text": after(lambda store: store.set("k", "text"), lambda store: store.add("k", 1)),
    "add to digits and text": after(lambda store: store.set("k", "41x"), lambda store: store.add("k", 1)),
    "add True": lambda store: store.add("n", True),
    "add a float": lambda store: store.add("n", 1.5),
    "add more than 64 bits": lambda store: store.add("n", 1 << 64),
    "add over the end": both(lambda store: store.add("n", (1 << 63) - 1), lambda store: store.add("n", 1)),
    "compare_set": both(
        lambda store: store.compare_set("k", "x", "1"),
        lambda store: store.check(["k"]),
        lambda store: store.compare_set("k", "", "1"),
        lambda store: store.compare_set("k", "", "2"),
        lambda store: store.compare_set("k", "x", "2"),
        lambda store: store.compare_set("k", "1", b"\xff"),
        lambda store: store.get("k"),
    ),
    "compare_set of nothing": after(lambda store: store.set("k", ""), lambda store: store.compare_set("k", "", "1")),
    "append": both(
        lambda store: store.append("k", "1"), lambda store: store.append("k", "2"), lambda store: store.get("k")
    ),
    "check": after(
        lambda store: store.set("k", ""),
        both(
            lambda store: store.check(["k"]), lambda store: store.check(["k", "missing"]), lambda store: store.check([])
        ),
    ),
    "check a text": lambda store: store.check("k"),
    "multi": both(
        lambda store: store.multi_set(["a", "b"], ["1", "2"]),
        lambda store: store.multi_get(["b", "a", "b"]),
        lambda store: store.multi_get([]),
    ),
    "multi_get what is missing": after(
        lambda store: store.set("k", ""), lambda store: store.multi_get(["k", "missing"])
    ),
    "multi_set more values than keys": lambda store: store.multi_set(["a"], ["1", "2"]),
    "num_keys": both(
        lambda store: store.num_keys(),
        lambda store: store.set("a", ""),
        lambda store: store.add("b", 1),
        lambda store: store.num_keys(),
    ),
    "list_keys": after(
        lambda store: store.set("a", ""), lambda store: store.set("b/c", ""), lambda store: sorted(store.list_keys())
    ),
    "delete_key": after(
        lambda store: store.set("k", "v"),
        both(
            lambda store: store.delete_key("k"), lambda store: store.delete_key("k"), lambda store: store.check(["k"])
        ),
    ),
    "queue": queue(
        lambda store: store.queue_len("q"),
        lambda store: store.queue_pop("q"),
        lambda store: store.queue_pop("q", False),
        lambda store: store.queue_len("q"),
        lambda store: store.queue_len("another"),
    ),
    "a queue and a value": queue(
        lambda store: store.set("q", "v"),
        lambda store: store.get("q"),
        lambda store: store.delete_key("q"),
        lambda store: store.queue_len("q"),
        lambda store: store.check(["q"]),
    ),
    "pop what is not there": lambda store: store.queue_pop("q", block=False),
    "wait to pop what is not there": lambda store: store.queue_pop("q"),
    "timeout": lambda store: store.timeout,
    "set_timeout": both(lambda store: store.set_timeout(timedelta(seconds=7)), lambda store: store.timeout),
    "set_timeout in seconds": both(lambda store: store.set_timeout(1.5), lambda store: store.timeout),
    "set_timeout in whole seconds": both(lambda store: store.set_timeout(2), lambda store: store.timeout),
    "set_timeout to None": lambda store: store.set_timeout(None),
    "has_extended_api": lambda store: store.has_extended_api(),
    "barrier": lambda store: store.barrier("meet", 1),
    "barrier that nobody else comes to": lambda store: store.barrier("meet", 2, timedelta(seconds=0.05)),
    "clone": both(lambda store: store.set("k", "v"), lambda store: store.clone().get("k")),
    "clone's timeout": lambda store: store.clone().timeout,
}
