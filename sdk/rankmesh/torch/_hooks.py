"""Hooks of a group, as torch 2.14 has them: torch's own are called by its C++, which the calls of this group bypass."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from rankmesh.torch._collectives import Collectives, _with_options
from rankmesh.torch._patches import untraced
from rankmesh.torch._work import run_in_thread

_ROOTED = ("BROADCAST", "REDUCE", "GATHER", "SCATTER")
"""Calls whose hooks are given the root."""


class Hooks:
    """Functions to call around the calls of one group, by the numbers with which they were registered."""

    def __init__(self) -> None:
        self.pre: dict[int, Callable[[Any], object]] = {}
        self.post: dict[int, Callable[[Any], object]] = {}
        self.abort: dict[int, Callable[[], None]] = {}
        self.numbers = itertools.count()

    def on_failure(self) -> None:
        """Call the abort hooks, in threads: this rank's lock may be held."""
        for hook in [*self.abort.values()]:
            run_in_thread(hook)


class HookedCollectives(Collectives):
    """Collectives that hooks can be registered for."""

    hooks: Hooks

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], object]) -> None:
        """Have a function called before each call, with torch's PreHookArgs; what it raises, the call raises."""
        self.hooks.pre[hook_id] = hook
        self._call_hooks()

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Undo ``register_pre_hook``."""
        self.hooks.pre.pop(hook_id, None)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], object]) -> None:
        """Have a function called after each call, which may be under way, with torch's PostHookArgs."""
        self.hooks.post[hook_id] = hook
        self._call_hooks()

    def unregister_post_hook(self, hook_id: int) -> None:
        """Undo ``register_post_hook``."""
        self.hooks.post.pop(hook_id, None)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Have a function called, in a thread of its own, as soon as this rank fails in the group, or knows of it."""
        self.hooks.abort[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Undo ``register_abort_hook``."""
        self.hooks.abort.pop(hook_id, None)

    def _call_hooks(self: Any) -> None:
        kind: Any = type(self)
        self.__class__ = _hooked(kind)


class _CallsHooks:
    """Marks the classes of groups whose calls call hooks."""


class NanCheck:
    """Check of the tensors that a rank sends, as torch's NanCheckHook."""

    def __init__(self, group: HookedCollectives) -> None:
        self._group = group
        group.register_pre_hook(id(self), self._check)

    def remove(self) -> None:
        """End the check. Does nothing the second time."""
        self._group.unregister_pre_hook(id(self))

    def _check(self, args: Any) -> None:
        if args.name.name in ("BROADCAST", "SCATTER") and args.root != self._group.mesh.rank():
            return
        for tensor in args.input_tensors:
            if tensor.is_floating_point():
                torch.ops.c10d.check_for_nan(tensor._values() if tensor.is_sparse else tensor)


class NoFlightRecorder:
    """Stands in for torch's FlightRecorderHook at these groups: the job's own recorder has the calls."""

    def __init__(self, group: HookedCollectives, ranks: Any = ()) -> None:
        pass

    def remove(self) -> None:
        """Do nothing."""


@functools.cache
def take_over_hooks() -> None:
    """Have these groups attach hooks of this module where torch attaches its own, which need a backend in C++.

    Those are NanCheckHook, by TORCH_DIST_NAN_CHECK=1, and from torch 2.15 on FlightRecorderHook, to each group.
    """
    for name, ours in {"NanCheckHook": NanCheck, "FlightRecorderHook": NoFlightRecorder}.items():
        kind = getattr(c10d, name, None)
        if kind is not None:
            kind.attach = functools.partial(_attach, ours, kind.attach)


def _attach(ours: Callable[..., object], theirs: Callable[..., object], pg: Any, *arguments: Any) -> object:
    return ours(pg, *arguments) if isinstance(pg, HookedCollectives) else theirs(pg, *arguments)


@functools.cache
def _hooked(kind: Any) -> Any:
    """Return a subclass of a group's class whose calls call its hooks: the calls of groups without hooks do not ask."""
    if issubclass(kind, _CallsHooks):
        return kind
    found = {name: each for name, each in vars(Collectives).items() if name[0] != "_" or name.endswith("_base")}
    ops = {name: _op_of([alias for alias in found if found[alias] is each]) for name, each in found.items()}
    methods = {name: _with_hooks(found[name], op) for name, op in ops.items() if op is not None}
    return type(kind.__name__, (_CallsHooks, kind), {**methods, "__module__": kind.__module__})


def _op_of(names: list[str]) -> Any:
    """Return torch's HookOpName of a method with these names, the most exact one; None for one without hooks."""
    names, members = [name.replace("_", "").upper() for name in names], c10d.HookOpName.__members__
    found = (each for each in members if any(name.startswith(each.replace("_", "")) for name in names))
    return members.get(max(found, key=len, default=""))


def _with_hooks(method: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """Return a method of a group that calls its hooks around another one."""
    parameters = [*inspect.signature(method).parameters][1:]

    @untraced
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        given = dict(zip(parameters, arguments, strict=False), **named)
        options = [each for each in given.values() if hasattr(each, "asyncOp")]
        options = options[-1] if options else _with_options(arguments, named, len(parameters))[-1]
        before, after = c10d.PreHookArgs(), c10d.PostHookArgs()
        before.name = after.name = op
        before.op_id = after.op_id = next(self.hooks.numbers)
        before.async_op = after.async_op = options.asyncOp
        before.root = options.rootRank if op.name in _ROOTED else given.get("dst", given.get("src", -1))
        sent, received = ["input", "inputs"], ["output", "outputs"]
        (received if op.name == "RECV" else sent).append("tensors")
        before.input_tensors = tree_leaves([given.get(name, ()) for name in sent])
        before.output_tensors = tree_leaves([given.get(name, ()) for name in received])
        for hook in [*self.hooks.pre.values()]:
            hook(before)
        after.work = work = method(self, *arguments, **named)  # torch keeps the half of it that is written in C++
        for hook in [*self.hooks.post.values()]:
            hook(after)
        return work

    return call
