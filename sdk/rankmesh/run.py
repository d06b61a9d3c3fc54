"""``python -m rankmesh.run``, for ``python -m torch.distributed.run``: the same as ``rankmesh run``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from rankmesh._jobs import run
from rankmesh.launch import main


class _Callable(ModuleType):
    """The module takes the place of the function ``rankmesh.run`` when it is imported."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return run(*args, **options)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main(prog="python -m rankmesh.run"))
