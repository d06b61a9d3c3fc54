"""torch.distributed as a mesh of services: ``import rankmesh as dist``.

The functions have the names, arguments and meaning of torch.distributed and take NumPy arrays, CuPy arrays, torch
tensors and what else exports a buffer or DLPack. A rank that dies or strays is named in the errors of the others. See
the README for the three ways to use it.

The names are in ``rankmesh._face``, which is loaded when the first of them is used: with NumPy and the engine it takes
longer than all the rest of the command ``rankmesh``, most of whose work, and a shell's completion, needs none of it.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from rankmesh._face import *  # noqa: F403
    from rankmesh._face import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        face = import_module("rankmesh._face")
        if name not in face.__dict__ or (name.startswith("__") and name not in ("__all__", "__version__")):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        offered = {each: value for each, value in vars(face).items() if not each.startswith("__")}
        globals().update(offered, __all__=face.__all__, __version__=face.__version__)
        return globals()[name]

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())
