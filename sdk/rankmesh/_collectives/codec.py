"""Codec: plain data and arrays as bytes, and back. Decoding builds values only: it runs no code of the sender.

::

    message    "RMO", version (one byte: 1, or 2 if it has a value r or f), one value
    value      one byte for the kind, then

      N T F    None, True, False
      i        int: length, two's complement
      d c      float: IEEE 754 binary64; complex: two of them
      s        str: length, UTF-8 (lone surrogates included)
      b B      bytes, bytearray: length, the bytes
      l t S Z  list, tuple, set, frozenset: count, values
      m        dict: count, then each key and its value
      n        NumPy scalar: dtype, the bytes of one element
      a f      NumPy array: dtype, number of dimensions (one byte), the dimensions, zeros up to an offset in the message
               that is a multiple of 16, elements in C order (a) or Fortran order (f)
      x        another object: its name (as behind 's'), then a value that it is made from
      r        an object that occurred before: its number

    dtype      length (one byte), NumPy's name with the byte order ("<f4", ">i8", "|b1"), or the name in wire.dtypes
               of a type that NumPy lacks ("bfloat16")
    length, count, dimension, number      LEB128, at most 63 bits

Numbers are in network byte order, array elements in that of their dtype. Ranges, dates, times, durations and NumPy's
strings are built-in kinds of 'x'; callers can add others (``extend``, ``revive``).

An object that occurs in several places is sent once and is one object again: values of the kinds l t S Z m B a f x, and
those of s and b from 16 bytes on, are numbered from 0 in the order in which they end. Within a key of a dict or an item
of a set, 'r' stands for s, b and x only, which keep their hash: the hash of nested tuples that share items would take
exponential time. Types are exact: an object of a subclass, such as an OrderedDict, is not plain data.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rankmesh_agent.wire import dtypes
from rankmesh_agent.wire.errors import ProtocolError

MAGIC: Final = b"RMO"
PLAIN_VERSION: Final = 1
"""Version of a message without shared objects and arrays in Fortran order."""
VERSION: Final = 2
MAX_DEPTH: Final = 100
"""Levels of nesting, in both directions: each takes the decoder's stack, which a sender must not exhaust."""

Extend = Callable[[Any, str], tuple[str, Any]]
"""Takes an object that is not plain data, and its position; returns a name and plain data, or raises."""
Revive = Callable[[str, Any], Any]
"""Takes such a name and data; returns the object, or raises."""


class CycleError(ValueError):
    """An object contains itself."""


_T = TypeVar("_T")
_ALIGNMENT = 16
_COLLISIONS = 64
"""Keys of one set or dict that may share a hash with others: each of them is compared with all of them."""
_COPIED = 1 << 12
"""Bytes up to which data is copied immediately, not kept to be joined at the end."""
_SHARED_BYTES = 16
"""Bytes from which text and bytes are numbered: a reference to less saves nothing."""
_VERSION_AT = len(MAGIC)
_DOUBLE = struct.Struct("!d")
_COMPLEX = struct.Struct("!dd")
_NUMPY_DTYPE = re.compile(r"[<>|](?:[biufc]\d{1,2}|[SU][1-9]\d{0,8}|[mM]8(?:\[(?:[1-9]\d{0,8})?[A-Za-z]{1,7}\])?)")


def _refuse(obj: Any, where: str) -> tuple[str, Any]:
    raise TypeError(f"{where} is a {type(obj).__module__}.{type(obj).__qualname__}, which is not plain data")


def _unknown(name: str, _: Any) -> Any:
    raise ProtocolError(f"an object of the kind {shown(name)} arrived, which is not known here")


def encode(obj: Any, *, name: str = "obj", extend: Extend = _refuse) -> bytes:
    """Return ``obj`` as bytes. Elements of large arrays are copied once.

    Args:
        obj: None, bool, int, float, complex, str, bytes, bytearray, range, date, datetime (in UTC, or of no time zone),
            timedelta, NumPy scalars and arrays (of numbers, bool, strings, times), and lists, tuples, dicts, sets and
            frozensets of all these.
        name: name of ``obj`` in errors.
        extend: converts objects of other types.

    Raises:
        TypeError: an object in ``obj`` is of another type; names its position.
        CycleError: ``obj`` contains itself; names the position.
        ValueError: ``obj`` is nested deeper than MAX_DEPTH; names the position.
    """
    encoder = _Encoder(name, extend)
    encoder.value(obj)
    return encoder.message()


def decode(data: bytes | bytearray | memoryview, *, revive: Revive = _unknown) -> Any:
    """Return the object that ``data`` holds.

    Memory use is proportional to ``data``, whatever sizes it claims. All arrays returned are writable. An array that
    makes up half of ``data`` or more is a view of it, if ``data`` is writable; others are copies.

    Args:
        data: a message of encode.
        revive: makes an object from the name and data that ``extend`` returned.

    Raises:
        ProtocolError: ``data`` is not such a message; names the fault and the byte.
    """
    return _Decoder(memoryview(data).cast("B"), revive).message()


def shown(value: Any) -> str:
    """Return a value of any size and type for an error message."""
    if isinstance(value, str | bytes):
        return repr(value[:]) if len(value) <= 40 else f"{value[:37]!r}..."
    if value is None or isinstance(value, bool | float) or (type(value) is int and value.bit_length() <= 64):
        return repr(value)
    return f"<{type(value).__qualname__}>"


class _Made(NamedTuple):
    """A type whose values are made from a few fields."""

    kind: type[Any]
    fields: tuple[type, ...]
    take_apart: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., Any]


def _moment(text: str, fold: int) -> datetime:
    return datetime.fromisoformat(text).replace(fold=fold)


_BUILT_IN: Final = {
    "range": _Made(range, (int, int, int), lambda r: (r.start, r.stop, r.step), range),
    "timedelta": _Made(timedelta, (int, int, int), lambda t: (t.days, t.seconds, t.microseconds), timedelta),
    "date": _Made(date, (str,), lambda d: (d.isoformat(),), date.fromisoformat),
    "datetime": _Made(datetime, (str, int), lambda t: (t.isoformat(), t.fold), _moment),
    # The slice is the plain string; str() and bytes() would cut zeros off its end.
    "numpy.str_": _Made(np.str_, (str,), lambda s: (s[:],), np.str_),
    "numpy.bytes_": _Made(np.bytes_, (bytes,), lambda b: (b[:],), np.bytes_),
}
_BUILT_IN_NAME: Final[dict[type[Any], str]] = {made.kind: name for name, made in _BUILT_IN.items()}


def _name_of(dtype: np.dtype[Any]) -> str | None:
    """Return an element type's name in a message, None if it has none."""
    if dtype.isbuiltin != 2 and _NUMPY_DTYPE.fullmatch(dtype.str):  # 2 is a type that another library added
        return dtype.str
    name = dtypes.display(dtype)
    return name if dtypes.FROM_NAME.get(name) == dtype else None


class _Encoder:
    """Writes one message."""

    def __init__(self, name: str, extend: Extend) -> None:
        self._name = name
        self._extend = extend
        self._parts: list[bytearray | memoryview] = []
        self._before = 0  # bytes in parts
        self._out = bytearray(MAGIC + bytes([PLAIN_VERSION]))  # the bytes after them
        self._version = PLAIN_VERSION
        self._open: dict[int, Any] = {}  # the containers being written, outermost first, by id
        self._keys: list[Any] = []  # the current item of each
        self._numbers: dict[int, int] = {}  # of the objects written, by id
        self._written: list[Any] = []  # these objects, so that no id is used again
        self._hashed = 0  # levels of keys and set items around the value

    def message(self) -> bytes:
        """Return the bytes written."""
        first = self._parts[0] if self._parts else self._out
        first[_VERSION_AT] = self._version
        return b"".join([*self._parts, self._out])

    def value(self, obj: Any) -> None:
        """Write a value."""
        number = self._numbers.get(id(obj))
        if number is not None and not (self._hashed and type(obj) in _UNCACHED):
            self._version = VERSION
            self._out += b"r"
            self._number(number)
            return
        write = _WRITERS.get(type(obj))
        if write is not None:
            write(self, obj)
        elif isinstance(obj, np.generic) and not isinstance(obj, np.void):
            self.scalar(obj)
        else:
            self._extension(obj)

    def _where(self) -> str:
        """Return the position of the value being written."""
        steps = (
            f"{{{shown(key)}}}" if isinstance(container, set | frozenset) else f"[{shown(key)}]"
            for container, key in zip(self._open.values(), self._keys, strict=True)
        )
        return self._name + "".join(steps)

    # Kinds of values

    def constant(self, obj: bool | None) -> None:
        """Write None, True or False."""
        self._out += b"N" if obj is None else b"T" if obj else b"F"

    def integer(self, obj: int) -> None:
        """Write an int."""
        self._counted(b"i", obj.to_bytes(obj.bit_length() // 8 + 1, "big", signed=True))

    def real(self, obj: float) -> None:
        """Write a float."""
        self._out += b"d" + _DOUBLE.pack(obj)

    def complex(self, obj: complex) -> None:
        """Write a complex number."""
        self._out += b"c" + _COMPLEX.pack(obj.real, obj.imag)

    def text(self, obj: str) -> None:
        """Write a str."""
        data = obj.encode("utf-8", "surrogatepass")
        self._counted(b"s", data)
        if len(data) >= _SHARED_BYTES:
            self._remember(obj)

    def octets(self, obj: bytes | bytearray) -> None:
        """Write bytes or a bytearray."""
        self._counted(b"b" if type(obj) is bytes else b"B", obj)
        if len(obj) >= _SHARED_BYTES or type(obj) is bytearray:
            self._remember(obj)

    def items(self, obj: Any) -> None:
        """Write a list, tuple, set or frozenset."""
        ordered = isinstance(obj, list | tuple)
        self._enter(obj)
        self._out += _TAGS[type(obj)]
        self._number(len(obj))
        self._hashed += not ordered
        for key, item in enumerate(obj) if ordered else zip(obj, obj, strict=True):
            self._keys[-1] = key
            self.value(item)
        self._hashed -= not ordered
        self._leave(obj)

    def mapping(self, obj: dict[Any, Any]) -> None:
        """Write a dict."""
        self._enter(obj)
        self._out += b"m"
        self._number(len(obj))
        for key, item in obj.items():
            self._keys[-1] = key
            self._hashed += 1
            self.value(key)
            self._hashed -= 1
            self.value(item)
        self._leave(obj)

    def scalar(self, obj: np.generic) -> None:
        """Write a NumPy scalar."""
        if (name := _name_of(obj.dtype)) is None:
            self._extension(obj)
            return
        self._out += b"n"
        self._dtype(name)
        self._out += dtypes.zero_padding(np.array([obj])).tobytes()

    def array(self, obj: npt.NDArray[Any]) -> None:
        """Write a NumPy array."""
        if (name := _name_of(obj.dtype)) is None:
            self._extension(obj)
            return
        fortran = obj.flags.fnc
        if fortran:
            self._version = VERSION
        self._out += b"f" if fortran else b"a"
        self._dtype(name)
        self._out.append(obj.ndim)
        for length in obj.shape:
            self._number(length)
        self._out += bytes(-(self._before + len(self._out)) % _ALIGNMENT)
        if obj.nbytes:
            self._bulk(
                dtypes.zero_padding(np.ascontiguousarray(obj.T if fortran else obj).reshape(-1)).view(np.uint8).data
            )
        self._remember(obj)

    def made(self, obj: Any) -> None:
        """Write a value of a type that is built in."""
        if type(obj) is datetime and obj.tzinfo is not None and obj.tzinfo is not UTC:
            self._extension(obj)  # a time zone is more than its offset
            return
        name = _BUILT_IN_NAME[type(obj)]
        self._named(obj, name, _BUILT_IN[name].take_apart(obj))

    def _extension(self, obj: Any) -> None:
        self._named(obj, *self._extend(obj, self._where()))

    # Parts of them

    def _named(self, obj: Any, name: str, data: Any) -> None:
        self._enter(obj)
        self._counted(b"x", name.encode())
        self.value(data)
        self._leave(obj)

    def _remember(self, obj: Any) -> None:
        self._numbers.setdefault(id(obj), len(self._written))
        self._written.append(obj)

    def _counted(self, tag: bytes, data: bytes | bytearray) -> None:
        self._out += tag
        self._number(len(data))
        self._bulk(memoryview(data))

    def _number(self, value: int) -> None:
        while value > 127:
            self._out.append(value & 127 | 128)
            value >>= 7
        self._out.append(value)

    def _dtype(self, name: str) -> None:
        self._out.append(len(name))
        self._out += name.encode()

    def _bulk(self, data: memoryview) -> None:
        if len(data) <= _COPIED:
            self._out += data
            return
        self._parts += [self._out, data]
        self._before += len(self._out) + len(data)
        self._out = bytearray()

    def _enter(self, obj: Any) -> None:
        if id(obj) in self._open:
            raise CycleError(f"{self._where()} contains itself; only data without cycles can be sent")
        if len(self._open) == MAX_DEPTH:
            raise ValueError(f"{self._where()} is nested too deep: only {MAX_DEPTH} levels can be sent")
        self._open[id(obj)] = obj
        self._keys.append(None)

    def _leave(self, obj: Any) -> None:
        self._open.popitem()
        self._keys.pop()
        self._remember(obj)


_UNCACHED: Final = frozenset((tuple, frozenset))
"""Types with items that can be hashed: their hash takes as long as their items' does."""
_TAGS: Final[dict[type[Any], bytes]] = {list: b"l", tuple: b"t", set: b"S", frozenset: b"Z"}
_WRITERS: Final[dict[type, Callable[[_Encoder, Any], None]]] = {
    type(None): _Encoder.constant,
    bool: _Encoder.constant,
    int: _Encoder.integer,
    float: _Encoder.real,
    complex: _Encoder.complex,
    str: _Encoder.text,
    bytes: _Encoder.octets,
    bytearray: _Encoder.octets,
    **dict.fromkeys(_TAGS, _Encoder.items),
    dict: _Encoder.mapping,
    np.ndarray: _Encoder.array,
    **dict.fromkeys(_BUILT_IN_NAME, _Encoder.made),
}


class _Decoder:
    """Reads one message."""

    def __init__(self, data: memoryview, revive: Revive) -> None:
        self._data = data
        self._at = 0
        self._depth = 0
        self._revive = revive
        self._read: list[Any] = []  # the numbered objects
        self._hashed = 0  # levels of keys and set items around the value
        self._length = 0  # bytes of the latest text or bytes

    def message(self) -> Any:
        """Read all of it."""
        head = bytes(self._take(len(MAGIC) + 1, "the beginning"))
        if head[:-1] != MAGIC:
            raise ProtocolError(f"expected an encoded object, got bytes that begin with {head!r}")
        if not PLAIN_VERSION <= head[-1] <= VERSION:
            raise ProtocolError(f"the object is encoded in version {head[-1]}, we speak {VERSION}: upgrade the older")
        value = self.value()
        if self._left:
            raise self._damage(f"{self._left} bytes too many")
        return value

    def value(self) -> Any:
        """Read a value."""
        tag = self._byte("a value")
        read = _READERS.get(tag)
        if read is None:
            raise self._damage(f"no value begins with {bytes([tag])!r}")
        value = read(self)
        if tag in _NUMBERED or (tag in _TEXT and self._length >= _SHARED_BYTES):
            self._read.append(value)
        return value

    @property
    def _left(self) -> int:
        return len(self._data) - self._at

    def _damage(self, problem: str) -> ProtocolError:
        return ProtocolError(f"an encoded object is damaged before byte {self._at} of {len(self._data)}: {problem}")

    # Kinds of values

    def integer(self) -> int:
        """Read an int."""
        return int.from_bytes(self.octets(), "big", signed=True)

    def real(self) -> float:
        """Read a float."""
        return float(_DOUBLE.unpack(self._take(_DOUBLE.size, "a float"))[0])

    def complex(self) -> complex:
        """Read a complex number."""
        return complex(*_COMPLEX.unpack(self._take(_COMPLEX.size, "a complex number")))

    def text(self) -> str:
        """Read a str."""
        try:
            return str(self.octets(), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._damage(f"a text is not UTF-8: {error.reason}") from None

    def octets(self) -> memoryview:
        """Read a length, and as many bytes."""
        self._length = self._number()
        return self._take(self._length, "a value")

    def items(self) -> list[Any]:
        """Read a count, and as many values."""
        count = self._number()
        if count > self._left:  # a value takes a byte at least
            raise self._damage(f"{count} values cannot be in {self._left} bytes")
        self._enter()
        values = [self.value() for _ in range(count)]
        self._depth -= 1
        return values

    def keys(self, build: Callable[[list[Any]], _T]) -> _T:
        """Read the items of a set or frozenset."""
        self._hashed += 1
        items = self.items()
        self._hashed -= 1
        return self.hashed(items, build)

    def mapping(self) -> dict[Any, Any]:
        """Read a dict."""
        count = self._number()
        if 2 * count > self._left:
            raise self._damage(f"{2 * count} values cannot be in {self._left} bytes")
        self._enter()
        keys, values = [], []
        for _ in range(count):
            self._hashed += 1
            keys.append(self.value())
            self._hashed -= 1
            values.append(self.value())
        self._depth -= 1
        return self.hashed(keys, lambda keys: dict(zip(keys, values, strict=True)))

    def reference(self) -> Any:
        """Read the number of an object that occurred before; return that object."""
        number = self._number()
        if number >= len(self._read):
            raise self._damage(f"object {number} is referred to, but there are {len(self._read)} before it")
        found = self._read[number]
        if self._hashed and type(found) in _UNCACHED:
            raise self._damage(f"a key refers to a {type(found).__name__}")
        return found

    def hashed(self, keys: list[Any], build: Callable[[list[Any]], _T]) -> _T:
        """Build a container that hashes its keys; refuse keys with so many collisions that it would take forever."""
        try:
            same = len(keys) - len(set(map(hash, keys)))
            if same <= _COLLISIONS:
                return build(keys)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._damage(f"a value that cannot be in a set or be a dict's key: {error}") from None
        raise self._damage(f"{same} keys of a set or dict have the hash of another")

    def scalar(self) -> np.generic:
        """Read a NumPy scalar."""
        dtype = self._dtype()
        scalar: np.generic = np.frombuffer(self._take(dtype.itemsize, "a NumPy scalar"), dtype)[0]
        if isinstance(scalar, np.void):
            raise self._damage(f"a NumPy scalar of dtype {dtype}")
        return scalar

    def array(self, order: Literal["C", "F"] = "C") -> npt.NDArray[Any]:
        """Read a NumPy array."""
        dtype = self._dtype()
        shape = [self._number() for _ in range(self._byte("a number of dimensions"))]
        self._take(-self._at % _ALIGNMENT, "the space before an array")
        data = self._take(math.prod(shape) * dtype.itemsize, "an array")
        if dtype.kind == "b" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
            raise self._damage("an array of bool has an element that is neither True nor False")
        try:
            array = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
            array = array.reshape(shape, order=order)
        except ValueError as error:
            raise self._damage(f"an array of shape {tuple(shape)}: {error}") from None
        large = 2 * len(data) >= len(self._data)
        return array if large and array.flags.writeable and array.flags.aligned else array.copy(order)

    def extension(self) -> Any:
        """Read a value of a built-in kind, or of one that the caller added."""
        name = self.text()
        self._enter()
        data = self.value()
        self._depth -= 1
        made = _BUILT_IN.get(name)
        if made is None:
            return self._revive(name, data)
        if type(data) is not tuple or tuple(map(type, data)) != made.fields:
            raise self._damage(f"a {name} is made from other values")
        try:
            return made.make(*data)
        except (ValueError, OverflowError) as error:
            raise self._damage(f"no {name}: {error}") from None

    # Parts of them

    def _enter(self) -> None:
        if self._depth == MAX_DEPTH:
            raise self._damage(f"nested deeper than {MAX_DEPTH} levels")
        self._depth += 1

    def _byte(self, what: str) -> int:
        at = self._at
        if at == len(self._data):
            raise self._damage(f"{what} is missing")
        self._at = at + 1
        return self._data[at]

    def _take(self, length: int, what: str) -> memoryview:
        at = self._at
        if length > len(self._data) - at:
            raise self._damage(f"{what} of {length} bytes cannot be in {self._left} bytes")
        self._at = at + length
        return self._data[at : self._at]

    def _number(self) -> int:
        value = shift = 0
        while (byte := self._byte("a length")) > 127:
            value |= (byte & 127) << shift
            shift += 7
            if shift == 63:
                raise self._damage("a length of more than 63 bits")
        return value | byte << shift

    def _dtype(self) -> np.dtype[Any]:
        name = str(self._take(self._byte("a dtype"), "a dtype"), "latin-1")
        if name in dtypes.FROM_NAME:
            return dtypes.FROM_NAME[name]
        try:
            if _NUMPY_DTYPE.fullmatch(name):
                return np.dtype(name)
        except (TypeError, ValueError):
            pass
        raise self._damage(f"unknown dtype {shown(name)}")


_READERS: Final[dict[int, Callable[[_Decoder], Any]]] = {
    ord("N"): lambda decoder: None,
    ord("T"): lambda decoder: True,
    ord("F"): lambda decoder: False,
    ord("i"): _Decoder.integer,
    ord("d"): _Decoder.real,
    ord("c"): _Decoder.complex,
    ord("s"): _Decoder.text,
    ord("b"): lambda decoder: bytes(decoder.octets()),
    ord("B"): lambda decoder: bytearray(decoder.octets()),
    ord("l"): _Decoder.items,
    ord("t"): lambda decoder: tuple(decoder.items()),
    ord("S"): lambda decoder: decoder.keys(set),
    ord("Z"): lambda decoder: decoder.keys(frozenset),
    ord("m"): _Decoder.mapping,
    ord("n"): _Decoder.scalar,
    ord("a"): _Decoder.array,
    ord("f"): lambda decoder: decoder.array("F"),
    ord("x"): _Decoder.extension,
    ord("r"): _Decoder.reference,
}
_NUMBERED: Final = frozenset(b"ltSZmBafx")
_TEXT: Final = frozenset(b"sb")
