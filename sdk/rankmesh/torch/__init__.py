"""Backend of torch.distributed: ``torch.distributed.init_process_group("rankmesh")``.

Importing this module registers the backend. With the package installed, ``import torch`` does so by itself (entry point
group ``torch.backends``), or torch 2.14 at the first use of the name (``torch.distributed.backends``). So this module
imports next to nothing; the creation of the first group imports the rest.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rankmesh_agent.config.env import replaces_gloo

if TYPE_CHECKING:
    from rankmesh.torch._factory import new_process_group as new_process_group
    from rankmesh.torch._functions import monitored_barrier as monitored_barrier
    from rankmesh.torch._functions import split_group as split_group
    from rankmesh.torch._gloo import replace_gloo as replace_gloo
    from rankmesh.torch._group import ProcessGroup as ProcessGroup
    from rankmesh.torch._store import Store as Store

__all__ = ["ProcessGroup", "Store", "monitored_barrier", "new_process_group", "register", "replace_gloo", "split_group"]

_OLDEST = (2, 7)
_MODULES = {
    "ProcessGroup": "_group",
    "Store": "_store",
    "monitored_barrier": "_functions",
    "new_process_group": "_factory",
    "replace_gloo": "_gloo",
    "split_group": "_functions",
}


def register() -> None:
    """Register the backend ``rankmesh`` in torch, and replace gloo if RANKMESH_AS=gloo.

    Does nothing the second time, or without c10d.

    Raises:
        ImportError: this version of torch is too old. Not while torch itself is imported, which calls this: then
            ``init_process_group("rankmesh")`` raises the error.
        ValueError: RANKMESH_AS has another value.
    """
    import torch
    import torch.distributed as c10d

    if not c10d.is_available() or hasattr(c10d.Backend, "RANKMESH"):
        return
    if not getattr(torch.__spec__, "_initializing", False):
        _refuse_older()
    c10d.Backend.register_backend("rankmesh", _create, extended_api=True, devices=["cpu"])
    _take_over_env()
    if replaces_gloo(os.environ):
        from rankmesh.torch._gloo import replace_gloo

        replace_gloo()


def _refuse_older() -> None:
    """Raise ImportError if this version of torch is too old."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise ImportError(
            f"backend 'rankmesh' needs torch {needed} or newer, but this is torch {torch.__version__}: "
            f"pip install 'torch>={needed}'; NumPy arrays need no torch: import rankmesh as dist"
        )


def _create(options: Any, backend_options: Any) -> Any:
    _refuse_older()
    from rankmesh.torch._factory import create

    return create(options, backend_options)


def _elastic_handler() -> Callable[[Any], Any]:
    """Return what creates the rendezvous of ``torchrun --rdzv-backend rankmesh``, for torchrun's entry point."""

    def create(params: Any) -> Any:
        from rankmesh.torch._elastic import GatewayRendezvous

        return GatewayRendezvous(params)

    return create


def _take_over_env() -> None:
    """Replace torch's handler of ``env://`` where ``handles_env()``: under ``rankmesh run``, srun and mpirun.

    torch's own handler would host, or connect to, a store of its own there. torch has no public way to replace a
    handler; without its table, torch's store at the launcher's gateway serves ``env://``.
    """
    from torch.distributed import rendezvous as module  # the function hides the module of that name

    table = getattr(module, "__globals__", {}).get("_rendezvous_handlers", {})
    original = table.get("env")
    if original is None:
        return

    def env(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        from rankmesh.torch._rendezvous import handles_env, rendezvous

        return rendezvous(url, **options) if handles_env() else original(url, **options)

    table["env"] = env
    if "_create_c10d_store" in module.__globals__:
        module.__globals__["_create_c10d_store"] = _hosting_elsewhere(module.__globals__["_create_c10d_store"])


def _hosting_elsewhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's choice of a store, by which rank 0 hosts one at any address but that of ``rankmesh run``.

    TORCHELASTIC_USE_AGENT_STORE says that the launcher hosts the store, also to ``tcp://`` at another address, and to
    the ranks of an inner job, who inherit it. An inner torchrun gives them a run id of its own.
    """

    @functools.wraps(original)
    def create(hostname: str, port: int, *arguments: Any, **options: Any) -> Any:
        from rankmesh_agent.config import launched

        environ, name = os.environ, "TORCHELASTIC_USE_AGENT_STORE"
        announced = environ.get(name) == "True" and launched.has_store(environ)
        if not announced or launched.is_launchers(environ, hostname, port):
            return original(hostname, port, *arguments, **options)
        environ[name] = "False"
        try:
            return original(hostname, port, *arguments, **options)
        finally:
            environ[name] = "True"

    return create


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    _refuse_older()
    public = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    public.__module__ = __name__
    return public


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
