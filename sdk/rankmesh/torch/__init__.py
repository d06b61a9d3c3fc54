"""A backend of torch.distributed: ``torch.distributed.init_process_group("rankmesh")``.

Importing this module makes the name known to torch. Where the package is installed, ``import torch`` does so by itself
(the entry point group ``torch.backends``), so this has to load next to nothing: what does the work is loaded when the
first group is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankmesh.torch._barrier import monitored_barrier as monitored_barrier
    from rankmesh.torch._group import ProcessGroup as ProcessGroup
    from rankmesh.torch._split import split_group as split_group
    from rankmesh.torch._store import Store as Store

__all__ = ["ProcessGroup", "Store", "monitored_barrier", "register", "split_group"]

_HOMES = {"ProcessGroup": "_group", "Store": "_store", "monitored_barrier": "_barrier", "split_group": "_split"}


def register() -> None:
    """Make the backend known to torch under the name ``rankmesh``. Does nothing the second time, or without c10d."""
    import torch.distributed as c10d

    if not c10d.is_available() or hasattr(c10d.Backend, "RANKMESH"):
        return
    c10d.Backend.register_backend("rankmesh", _create, extended_api=True, devices=["cpu"])
    _take_over_env()


def _create(options: Any, backend_options: Any) -> Any:
    from rankmesh.torch._factory import create

    return create(options, backend_options)


def _take_over_env() -> None:
    """Have torch's ``env://`` go to the mesh's store where ``launched()``: under ``rankmesh run``, srun, mpirun.

    torch's own would host, or look for, a store of its own there. There is no public way to change a scheme of torch's:
    where its table is not found, only ``rankmesh run`` with another init method works.
    """
    from torch.distributed import rendezvous as module  # the function hides the module of that name

    table = getattr(module, "__globals__", {}).get("_rendezvous_handlers", {})
    torchs = table.get("env")
    if torchs is None:
        return

    def env(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        from rankmesh.torch._rendezvous import handles_env, rendezvous

        return rendezvous(url, **options) if handles_env() else torchs(url, **options)

    table["env"] = env


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    public = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    public.__module__ = __name__
    return public


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
