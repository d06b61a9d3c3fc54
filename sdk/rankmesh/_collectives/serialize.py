"""Serialization of objects: by pickle where that is allowed, else plain data alone.

A pickle is code: reading one runs what its writer chose. So ranks pickle only if they have authenticated each other
with the job's token, and RANKMESH_PICKLE is not ``never``. A rank that must not pickle sends plain data (plain.py) and
reads no pickle. Pickles come within a host, or over TLS, unless the operator declares the network private. The bytes
of large arrays and tensors travel apart from the message and are not copied.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankmesh._collectives import plain
from rankmesh._collectives.plain import Octets
from rankmesh._session.session import require_session
from rankmesh._tensors.layout import type_name
from rankmesh_agent.wire.errors import ProtocolError

MAX_APART = 16
"""Arrays of one message whose bytes travel apart: each is a transfer of its own."""
_MIN_APART = 1 << 16
"""Bytes from which a copy costs more than a transfer."""
_PROTOCOL = 5
_MAX_STEPS = 500
"""Levels of nesting in which the object that cannot be encoded is looked for."""


class Message(NamedTuple):
    """An object as bytes: a pickle, or plain data."""

    data: bytes | memoryview
    apart: list[Octets]
    pickled: bool


def dumps(obj: Any, name: str, weights_only: bool = False) -> Message:
    """Return an object as bytes, some of which are those of the object's arrays.

    Args:
        obj: the object.
        name: its name in errors.
        weights_only: whether pickling is not allowed for this call.

    Raises:
        TypeError: an object in it is not plain data, and pickling is not allowed; names position and remedy.
        ValueError: it is nested too deep, or contains itself, where pickling is not allowed; names the position.
        Exception: an object in it cannot be pickled; pickle's error, with a note that names the position.
    """
    refusal = _pickle_refusal(weights_only)
    encode = _plain if refusal else _pickle
    try:
        return encode(obj)
    except RecursionError as error:
        error.add_note(f"{name} is nested too deep to be pickled")
        raise
    except Exception as error:  # also errors of the object's own code
        where, culprit, cycle = _culprit(obj, name, encode, [])
        what = f"{where} is a {type_name(culprit)}, which is not plain data"
        if not refusal:
            error.add_note(f"{what} and cannot be pickled")
            raise
        if cycle:
            raise ValueError(f"{where} contains itself; only data without cycles can be sent; {refusal}") from None
        if isinstance(error, ValueError):  # msgpack's limit
            raise ValueError(f"{name} is nested too deep for plain data; {refusal}") from None
        raise TypeError(f"{what}; {refusal}") from None


def loads(message: Message, weights_only: bool = False) -> Any:
    """Return the object of a message; its arrays share the memory of what travelled apart.

    Raises:
        ProtocolError: it is damaged, or a pickle that must not be read here.
        ImportError: it contains a torch tensor, and torch is not installed.
        Exception: raised by pickle, and by the code of a pickled object.
    """
    data, apart, pickled = message
    if not pickled:
        return plain.decode(data, apart)
    if refusal := _pickle_refusal(weights_only):
        raise ProtocolError(f"a pickled object arrived and was not read; {refusal}")
    return pickle.loads(data, buffers=apart)


def _plain(obj: Any) -> Message:
    apart: list[Octets] = []
    return Message(plain.encode(obj, lambda octets: _put_apart(octets, apart)), apart, pickled=False)


def _pickle(obj: Any) -> Message:
    apart: list[Octets] = []

    def in_message(buffer: pickle.PickleBuffer) -> bool:
        return _put_apart(np.frombuffer(buffer.raw(), np.uint8), apart) is None

    file = io.BytesIO()
    pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=in_message)
    pickler.dispatch_table = copyreg.dispatch_table | _reducers()
    pickler.dump(obj)
    return Message(file.getbuffer(), apart, pickled=True)


def _put_apart(octets: Octets, apart: list[Octets]) -> int | None:
    if octets.size < _MIN_APART or len(apart) == MAX_APART:
        return None
    apart.append(octets)
    return len(apart) - 1


def _reducers() -> dict[type, Callable[[Any], Any]]:
    torch = sys.modules.get("torch")  # a caller with a tensor has imported it
    return {np.ndarray: _reduce_array} if torch is None else {np.ndarray: _reduce_array, torch.Tensor: _reduce_tensor}


def _reduce_array(array: npt.NDArray[Any]) -> Any:
    # Every array that arrives can be written to.
    return (array if array.flags.writeable else array.copy("K")).__reduce_ex__(_PROTOCOL)


def _reduce_tensor(tensor: Any) -> Any:
    # torch's own pickles copy the elements.
    try:
        return plain.tensor_of, plain.tensor_fields(tensor)
    except TypeError:
        return tensor.__reduce_ex__(_PROTOCOL)  # not dense


def _pickle_refusal(weights_only: bool) -> str:
    """Return the reason why this rank neither pickles nor unpickles, and the remedy; '' if it does."""
    if weights_only:
        return "weights_only=True forbids to pickle it: send plain data and arrays"
    settings = require_session().agent.settings
    if settings.pickle == "never":
        return "RANKMESH_PICKLE=never forbids to pickle it: send plain data and arrays"
    if not settings.token:
        return (
            "only ranks that know the job's token pickle: set RANKMESH_TOKEN to the same secret on all ranks "
            "('rankmesh run' does), or send plain data and arrays"
        )
    return ""


# Errors


def _culprit(obj: Any, where: str, encode: Callable[[Any], Message], around: list[Any]) -> tuple[str, Any, bool]:
    """Return position and value of the innermost object that cannot be encoded, and whether it contains itself."""
    if any(obj is container for container in around):
        return where, obj, True
    if len(around) == _MAX_STEPS:
        return where, obj, False
    for step, item in _items(obj):
        try:
            encode(item)
        except Exception:
            return _culprit(item, where + step, encode, [*around, obj])
    return where, obj, False


def _items(obj: Any) -> Iterator[tuple[str, Any]]:
    if type(obj) in (list, tuple):
        for number, item in enumerate(obj):
            yield f"[{number}]", item
    elif type(obj) is dict:
        for key, item in obj.items():
            yield f"[{_shown(key)}]", item
            yield f"[{_shown(key)}]", key
    elif type(obj) in (set, frozenset):
        for item in obj:
            yield f"{{{_shown(item)}}}", item


def _shown(key: Any) -> str:
    if type(key) in (str, bytes):
        return repr(key) if len(key) <= 40 else f"{key[:37]!r}..."
    if key is None or type(key) in (bool, float) or (type(key) is int and key.bit_length() <= 64):
        return repr(key)
    return f"<{type(key).__qualname__}>"
