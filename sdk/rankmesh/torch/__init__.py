"""Backend of torch.distributed: ``torch.distributed.init_process_group("rankmesh")``.

Importing this module registers the backend. With the package installed, ``import torch`` does so by itself (entry point
group ``torch.backends``). So this module imports next to nothing; the creation of the first group imports the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rankmesh_agent.config.env import replaces_gloo

if TYPE_CHECKING:
    from rankmesh.torch._factory import new_process_group as new_process_group
    from rankmesh.torch._functions import monitored_barrier as monitored_barrier
    from rankmesh.torch._functions import split_group as split_group
    from rankmesh.torch._gloo import replace_gloo as replace_gloo
    from rankmesh.torch._group import ProcessGroup as ProcessGroup
    from rankmesh.torch._store import Store as Store

__all__ = ["ProcessGroup", "Store", "monitored_barrier", "new_process_group", "register", "replace_gloo", "split_group"]

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
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
        ValueError: RANKMESH_AS has another value.
    """
    import torch.distributed as c10d

    if not c10d.is_available() or hasattr(c10d.Backend, "RANKMESH"):
        return
    c10d.Backend.register_backend("rankmesh", _create, extended_api=True, devices=["cpu"])
    _take_over_env()
    if replaces_gloo(os.environ):
        from rankmesh.torch._gloo import replace_gloo

        replace_gloo()


def _create(options: Any, backend_options: Any) -> Any:
    from rankmesh.torch._factory import create

    return create(options, backend_options)


def _take_over_env() -> None:
    """Replace torch's handler of ``env://`` and its choice of a store where ``handles_env()``: under ``rankmesh run``, srun and mpirun.

    torch's own handler would host, or connect to, a store of its own there. torch has no public way to replace a
    handler; without its table, ``rankmesh run`` requires another init method.
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
    original_store = module.__globals__["_create_c10d_store"]

    def create_store(hostname: str, port: int, *arguments: Any, **options: Any) -> Any:
        if not _is_of_outer_job(port):
            return original_store(hostname, port, *arguments, **options)
        os.environ[_AGENT_STORE] = "False"
        try:
            return original_store(hostname, port, *arguments, **options)
        finally:
            os.environ[_AGENT_STORE] = "True"

    module.__globals__["_create_c10d_store"] = create_store


def _is_of_outer_job(port: int) -> bool:
    """Return whether the store that TORCHELASTIC_USE_AGENT_STORE announces is that of ``rankmesh run``, at another port.

    So it is for an inner job, whose ranks inherit the variable, and for ``tcp://``: rank 0 hosts the store of these.
    """
    environ = os.environ
    launchers = environ.get(_AGENT_STORE) == "True" and environ.get("TORCHELASTIC_RUN_ID") == environ.get("RANKMESH_JOB")
    return launchers and urlsplit(environ.get("RANKMESH_GATEWAY", "")).port != port


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    public = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    public.__module__ = __name__
    return public


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
