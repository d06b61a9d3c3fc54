"""torch's DistributedDataParallel over the mesh, laid out like torch.nn.parallel. torch is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel:
    """Wraps a torch module in torch's own DistributedDataParallel, which communicates over the mesh.

    Construction returns an instance of ``torch.nn.parallel.DistributedDataParallel``, which is also the class to use
    with ``isinstance``. Without torch, use ``rankmesh.nn.GradientBucketer``.

    Args:
        module: the ``torch.nn.Module`` to train.
        arguments, options: as torch's DistributedDataParallel takes them.
        process_group: a torch process group with the backend ``"rankmesh"``, or a group of rankmesh; torch's default
            group if None, which is made from rankmesh's world if torch has none.

    Raises:
        ImportError: torch is not installed.
        ValueError: there is no process group, or this process is not in it, or it has another backend.

    Source: https://pytorch.org/docs/2.1/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    def __new__(cls, module: Any, *arguments: Any, process_group: Any = None, **options: Any) -> Any:
        try:
            torchs, parallel = import_module("torch.distributed"), import_module("torch.nn.parallel")
        except ImportError as error:
            raise ImportError(
                "DistributedDataParallel is torch's, and torch is not installed: pip install 'rankmesh[torch]', or use "
                "rankmesh.nn.GradientBucketer with NumPy arrays"
            ) from error
        functions = import_module("rankmesh.torch._functions")
        if process_group is None:
            functions.ensure_default_group()
        else:
            process_group = functions.torch_group(process_group)
        backend = torchs.get_backend(process_group) if torchs.is_initialized() else None
        if backend != "rankmesh":
            found = "there is none" if backend is None else f"this one has the backend {backend!r}"
            raise ValueError(
                f"DistributedDataParallel needs a torch process group over the mesh, and {found}: call "
                'torch.distributed.init_process_group("rankmesh") or rankmesh.init_process_group() first'
            )
        return parallel.DistributedDataParallel(module, *arguments, process_group=process_group, **options)
