"""Plain data as msgpack: decoding it builds values only and runs no code of the sender.

msgpack has None, bool, int of 64 bits, float, str, bytes, list and dict. A value of another kind is a list that begins
with an extension: its code is the kind, the other items are what the value is made from, for example a tuple's items.
Types are exact: an object of a subclass, such as an OrderedDict, is not plain data.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from rankmesh._tensors.torch_buffer import TorchBuffer
from rankmesh_agent.wire import dtypes
from rankmesh_agent.wire.errors import ProtocolError

Octets = npt.NDArray[np.uint8]
PutApart = Callable[[Octets], int | None]
"""Takes the bytes of an array; returns their number if they travel apart from the message, None if in it."""

_COLLISIONS = 64
"""Keys of one set or dict that may share a hash with others: each of them is compared with all of them."""
_NUMPY_DTYPE = re.compile(r"[<>|](?:[biufc]\d{1,2}|[SU][1-9]\d{0,8}|[mM]8(?:\[(?:[1-9]\d{0,8})?[A-Za-z]{1,7}\])?)")
_UTF_8: Final[dict[str, Any]] = {"unicode_errors": "surrogatepass"}


def encode(obj: Any, put_apart: PutApart) -> bytes:
    """Return ``obj`` as bytes.

    Args:
        obj: None, bool, int, float, complex, str, bytes, range, date, datetime (in UTC, or of no time zone), timedelta,
            NumPy scalars and arrays (of numbers, bool, strings, times), dense torch tensors, and lists, tuples, dicts,
            sets and frozensets of all these. A bytearray becomes bytes.
        put_apart: says which arrays travel apart.

    Raises:
        TypeError: an object in ``obj`` is of another type.
        ValueError: ``obj`` is nested deeper than msgpack allows (510 levels at least), or contains itself.
    """

    def fields(value: Any) -> list[Any]:
        code = _CODES.get(type(value))
        if code is None:
            code = _code(value)
        return [msgpack.ExtType(code, b""), *_KINDS[code].take_apart(value, put_apart)]

    return bytes(msgpack.packb(obj, default=fields, strict_types=True, **_UTF_8))


def decode(data: bytes | memoryview, apart: Sequence[Octets]) -> Any:
    """Return the object that ``data`` holds.

    Memory use is proportional to ``data``, whatever sizes it claims. All arrays returned are writable.

    Args:
        data: a message of encode.
        apart: the bytes of arrays that travelled apart, by number; the arrays returned are views of them.

    Raises:
        ProtocolError: ``data`` is not such a message; names the fault.
        ImportError: it contains a torch tensor, and torch is not installed.
    """
    unused = 0

    def kind(code: int, data: bytes) -> _Kind:
        nonlocal unused
        unused += 1
        if data or not 0 <= code < len(_KINDS):
            raise ProtocolError(f"plain data has a value of kind {code}, which is not known here")
        return _KINDS[code]

    def made(items: list[Any]) -> Any:
        nonlocal unused
        if not items or type(items[0]) is not _Kind:
            return items
        unused -= 1
        return items[0].make(apart, *items[1:])

    try:
        value = msgpack.unpackb(
            data, list_hook=made, object_pairs_hook=_dict, ext_hook=kind, strict_map_key=False, **_UTF_8
        )
        if unused:
            raise ProtocolError("plain data has a kind of a value without the value")
        return value
    except (ProtocolError, ImportError):
        raise
    except Exception as error:  # of msgpack, and of the types that values are made from
        raise ProtocolError(f"plain data is damaged: {type(error).__name__}: {error}") from None


class _Kind(NamedTuple):
    """A kind of values that msgpack lacks.

    Attributes:
        take_apart: takes a value and ``put_apart``; returns what the value is made from.
        make: takes ``apart`` and these parts; returns the value, or raises.
    """

    take_apart: Callable[[Any, PutApart], Sequence[Any]]
    make: Callable[..., Any]


def _code(value: Any) -> int:
    """Return the code of a value whose type is not in _CODES."""
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        return _CODES[np.generic]
    torch = sys.modules.get("torch")  # a caller with a tensor has imported it
    if torch is not None and type(value) is torch.Tensor:
        return len(_KINDS) - 1
    raise _not_plain(value)


def _not_plain(value: Any) -> TypeError:
    return TypeError(f"a {type(value).__qualname__} is not plain data")


def _hashable(keys: Sequence[Any]) -> Sequence[Any]:
    """Return keys of a set or dict; refuse so many that share a hash that comparing them would take forever."""
    if len(keys) > _COLLISIONS and len(keys) - len(set(map(hash, keys))) > _COLLISIONS:
        raise ProtocolError(f"more than {_COLLISIONS} of {len(keys)} keys of a set or dict have the hash of another")
    return keys


def _dict(items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    _hashable([key for key, _ in items])
    return dict(items)


def _moment_fields(value: datetime, _: PutApart) -> tuple[str, int]:
    if value.tzinfo is not None and value.tzinfo is not UTC:
        raise _not_plain(value)  # a time zone is more than its offset
    return value.isoformat(), value.fold


# Arrays


def _dtype_name(dtype: np.dtype[Any], value: Any) -> str:
    if dtype.isbuiltin != 2 and _NUMPY_DTYPE.fullmatch(dtype.str):  # 2 is a type that another library added
        return dtype.str
    name = dtypes.display(dtype)
    if dtypes.FROM_NAME.get(name) != dtype:
        raise _not_plain(value)
    return name


def _dtype(name: str) -> np.dtype[Any]:
    if name not in dtypes.FROM_NAME and not _NUMPY_DTYPE.fullmatch(name):
        raise ProtocolError(f"plain data has an array of the unknown dtype {name[:40]!r}")
    return dtypes.FROM_NAME.get(name) or np.dtype(name)


def _scalar_fields(scalar: np.generic, _: PutApart) -> tuple[str, bytes]:
    return _dtype_name(scalar.dtype, scalar), dtypes.zero_padding(np.array([scalar])).tobytes()


def _scalar(_: Any, name: str, data: bytes) -> np.generic:
    (scalar,) = np.frombuffer(data, _dtype(name))
    if not isinstance(scalar, np.generic) or isinstance(scalar, np.void):
        raise ProtocolError(f"plain data has a NumPy scalar of dtype {name}")
    return scalar


def _array_fields(array: npt.NDArray[Any], put_apart: PutApart) -> tuple[str, list[int], bool, int | bytes]:
    fortran = array.flags.fnc
    name = _dtype_name(array.dtype, array)
    elements = np.ascontiguousarray(array.T if fortran else array).reshape(-1)
    octets = dtypes.zero_padding(elements).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
    number = put_apart(octets)
    return name, list(array.shape), fortran, octets.tobytes() if number is None else number


def _array(apart: Sequence[Octets], name: str, shape: list[int], fortran: bool, data: int | bytes) -> npt.NDArray[Any]:
    octets = np.frombuffer(data, np.uint8).copy() if isinstance(data, bytes) else apart[data]
    dtype = _dtype(name)
    if dtype.kind == "b" and octets.max(initial=0) > 1:
        raise ProtocolError("plain data has an array of bool with an element that is neither True nor False")
    elements = octets.view(dtype) if octets.size else np.empty(0, dtype)
    return elements.reshape(shape, order="F" if fortran else "C")


def tensor_fields(tensor: Any) -> tuple[str, bool, list[int], Octets]:
    """Return what ``tensor_of`` makes a tensor from; TypeError if it is sparse, or on neither a CPU nor a GPU."""
    array = np.ascontiguousarray(TorchBuffer(tensor, "tensor").host_array()[0])
    octets = array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
    return str(tensor.dtype), bool(tensor.requires_grad), list(tensor.shape), octets


def tensor_of(name: str, requires_grad: bool, shape: list[int], octets: Octets) -> Any:
    """Return a torch tensor in host memory; ProtocolError if the parts are wrong, ImportError without torch."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise ImportError("a torch tensor arrived, and torch is not installed here; send NumPy arrays") from error
    try:
        dtype = getattr(torch, name.removeprefix("torch."))
        flat = torch.from_numpy(octets).view(dtype) if octets.size else torch.empty(0, dtype=dtype)
        return flat.reshape(shape).requires_grad_(requires_grad)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ProtocolError(f"a torch tensor is damaged: {error}") from error


def _plain_tensor_fields(tensor: Any, _: PutApart) -> Sequence[Any]:
    try:
        return tensor_fields(tensor)  # its bytes are an array
    except TypeError:
        raise _not_plain(tensor) from None


def _made_by(type_: type, *names: str) -> _Kind:
    """Return the kind of a type whose constructor takes some attributes of a value."""
    return _Kind(lambda value, _: [getattr(value, name) for name in names], lambda _, *parts: type_(*parts))


_KIND_OF: Final[dict[type, _Kind]] = {
    tuple: _Kind(lambda items, _: items, lambda _, *items: items),
    set: _Kind(lambda items, _: list(items), lambda _, *items: set(_hashable(items))),
    frozenset: _Kind(lambda items, _: list(items), lambda _, *items: frozenset(_hashable(items))),
    complex: _made_by(complex, "real", "imag"),
    int: _Kind(  # of more than 64 bits
        lambda value, _: (value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True),),
        lambda _, data: int.from_bytes(data, "big", signed=True),
    ),
    range: _made_by(range, "start", "stop", "step"),
    timedelta: _made_by(timedelta, "days", "seconds", "microseconds"),
    date: _made_by(date, "year", "month", "day"),
    datetime: _Kind(_moment_fields, lambda _, text, fold: datetime.fromisoformat(text).replace(fold=fold)),
    # The slice is the plain string; str() and bytes() would cut zeros off its end. The sum refuses other types: NumPy
    # would make bytes of that length from a number.
    np.str_: _Kind(lambda value, _: (value[:],), lambda _, text: np.str_("" + text)),
    np.bytes_: _Kind(lambda value, _: (value[:],), lambda _, data: np.bytes_(b"" + data)),
    np.ndarray: _Kind(_array_fields, _array),
    np.generic: _Kind(_scalar_fields, _scalar),
}
_TENSOR: Final = _Kind(_plain_tensor_fields, lambda _, *parts: tensor_of(*parts))
_KINDS: Final = (*_KIND_OF.values(), _TENSOR)
_CODES: Final = {type_: code for code, type_ in enumerate(_KIND_OF)}
