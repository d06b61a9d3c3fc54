"""Objects as bytes and back: plain data by the codec, torch tensors as arrays, the rest pickled where that is allowed.

A pickle is code: who reads it runs what its writer wants. So an object that is not plain data is pickled, by itself and
not with what it is in, only if the ranks have proved to each other that they know the job's token, and RANKMESH_PICKLE
is not ``never``. Elsewhere it is refused: by the sender when it is sent, and unread by the receiver.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

import numpy as np

from rankmesh._collectives import codec
from rankmesh._session.session import require_session
from rankmesh._tensors.layout import type_name
from rankmesh._tensors.torch_buffer import TorchBuffer
from rankmesh_agent.wire.errors import ProtocolError

_PICKLE = "pickle"
_PROTOCOL = 5
"""Every Python that this package runs on reads it."""
_TENSOR = "torch.Tensor"


def dumps(obj: Any, name: str) -> bytes:
    """Return an object as bytes.

    Args:
        obj: the object.
        name: what errors call it.

    Raises:
        TypeError: something in it is not plain data and must not, or cannot, be pickled; says where and what to do.
        ValueError: it contains itself, or is nested too deep; says where.
    """
    return codec.encode(obj, name=name, extend=_extend)


def loads(data: memoryview) -> Any:
    """Return the object that ``dumps`` made ``data`` of.

    Args:
        data: the bytes; if they can be written to, the object may keep them.

    Raises:
        ProtocolError: ``data`` is something else, or has a pickled object in it that must not be read here.
        ImportError: there is a torch tensor in it, and no torch here.
        Exception: whatever the code of an object that was pickled raises.
    """
    return codec.decode(data, revive=_revive)


def _extend(obj: Any, where: str) -> tuple[str, Any]:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and type(obj) is torch.Tensor:
        try:
            return _TENSOR, (str(obj.dtype), bool(obj.requires_grad), TorchBuffer(obj, where).host_array()[0])
        except TypeError:
            pass  # not dense, or not in host memory: torch can pickle some of these
    if reason := _no_pickle():
        raise TypeError(f"{where} is a {type_name(obj)}, which is not plain data; {reason}")
    try:
        return _PICKLE, pickle.dumps(obj, _PROTOCOL)
    except Exception as error:  # of the object's own code, too
        raise TypeError(f"{where} is a {type_name(obj)}, which cannot be pickled: {error}") from error


def _revive(name: str, data: Any) -> Any:
    if name == _TENSOR:
        return _tensor(data)
    if name != _PICKLE or not isinstance(data, bytes):
        raise ProtocolError(f"an object of the kind {codec.shown(name)} arrived, which is not known here")
    if reason := _no_pickle():
        raise ProtocolError(f"a pickled object arrived and was not read; {reason}")
    return pickle.loads(data)


def _no_pickle() -> str:
    """Say why nothing is pickled or unpickled here, '' if it is."""
    settings = require_session().agent.settings
    if settings.pickle == "never":
        return "RANKMESH_PICKLE=never forbids to pickle it: send plain data and arrays"
    if not settings.token:
        return (
            "only ranks that know the job's token pickle: set RANKMESH_TOKEN to the same secret on all ranks "
            "('rankmesh run' does), or send plain data and arrays"
        )
    return ""


def _tensor(data: Any) -> Any:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise ImportError("a torch tensor arrived, and torch is not installed here; send NumPy arrays") from error
    try:
        name, requires_grad, array = data
        dtype = getattr(torch, name.removeprefix("torch."))
        if array.size:
            flat = torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype)
        else:
            flat = torch.empty(0, dtype=dtype)
        return flat.reshape(array.shape).requires_grad_(requires_grad)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ProtocolError(f"a torch tensor is damaged: {error}") from error
