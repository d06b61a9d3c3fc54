"""Serialization of objects: plain data by the codec, torch tensors as arrays, other objects by pickle if allowed.

A pickle is code: reading one runs what its writer chose. So an object that is not plain data is pickled, by itself and
not with its container, only if the ranks have authenticated each other with the job's token, and RANKMESH_PICKLE is not
``never``. Otherwise the sender refuses the object, and a receiver does not read the pickle. An object that contains
itself is pickled as a whole. Pickles come within a host, or over TLS, unless the operator declares the
network private.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any, NamedTuple

import numpy as np

from rankmesh._collectives import codec
from rankmesh._session.session import require_session
from rankmesh._tensors.layout import type_name
from rankmesh._tensors.torch_buffer import TorchBuffer
from rankmesh_agent.wire.errors import ProtocolError

_PICKLE = "pickle"
_PROTOCOL = 5
"""Every Python that this package supports reads it."""
_TENSOR = "torch.Tensor"


class _Whole(NamedTuple):
    """An object to be pickled as a whole."""

    obj: Any


def dumps(obj: Any, name: str) -> bytes:
    """Return an object as bytes.

    Args:
        obj: the object.
        name: its name in errors.

    Raises:
        TypeError: an object in it is not plain data, and pickling is not allowed; names position and remedy.
        ValueError: it is nested too deep, or contains itself where pickling is not allowed; names the position.
        Exception: an object in it cannot be pickled; pickle's error, with a note that names the position.
    """
    try:
        return codec.encode(obj, name=name, extend=_extend)
    except codec.CycleError as error:
        if reason := _pickle_refusal():
            raise ValueError(f"{error}; {reason}") from None
        return codec.encode(_Whole(obj), name=name, extend=_extend)


def loads(data: memoryview) -> Any:
    """Return the object of a message of ``dumps``.

    Args:
        data: the bytes; if they are writable, arrays may share their memory.

    Raises:
        ProtocolError: ``data`` is not such a message, or contains a pickle that must not be read here.
        ImportError: it contains a torch tensor, and torch is not installed.
        Exception: raised by the code of a pickled object.
    """
    return codec.decode(data, revive=_revive)


def _extend(obj: Any, where: str) -> tuple[str, Any]:
    if type(obj) is _Whole:
        obj = obj.obj
    torch = sys.modules.get("torch")  # a caller with a tensor has imported it
    if torch is not None and type(obj) is torch.Tensor:
        try:
            return _TENSOR, (str(obj.dtype), bool(obj.requires_grad), TorchBuffer(obj, where).host_array()[0])
        except TypeError:
            pass  # not dense, or not in host memory: torch can pickle some of these
    if reason := _pickle_refusal():
        raise TypeError(f"{where} is a {type_name(obj)}, which is not plain data; {reason}")
    try:
        return _PICKLE, pickle.dumps(obj, _PROTOCOL)
    except Exception as error:  # also errors of the object's own code
        error.add_note(f"{where} is a {type_name(obj)}, which is not plain data and cannot be pickled")
        raise


def _revive(name: str, data: Any) -> Any:
    if name == _TENSOR:
        return _tensor(data)
    if name != _PICKLE or not isinstance(data, bytes):
        raise ProtocolError(f"an object of the kind {codec.shown(name)} arrived, which is not known here")
    if reason := _pickle_refusal():
        raise ProtocolError(f"a pickled object arrived and was not read; {reason}")
    return pickle.loads(data)


def _pickle_refusal() -> str:
    """Return the reason why this rank neither pickles nor unpickles, and the remedy; '' if it does."""
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
