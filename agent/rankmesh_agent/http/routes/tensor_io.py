"""Arrays as bodies of requests and answers: .npy files, JSON, or raw elements whose dtype and shape the query has."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from rankmesh_agent.wire import json_text, npy
from rankmesh_agent.wire.dtypes import FROM_NAME, display
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.object_records import MAGIC, RECORD_BYTES

Array = npy.Array

NPY = "application/x-npy"
RAW = "application/octet-stream"
"""Media type of elements in C order and in the byte order of the agents' machines, little-endian."""
JSON = "application/json"
"""Media type of numbers as text, in lists of lists: of float64, or the dtype in the query."""
_UNSPECIFIC_TYPES = frozenset({"", RAW, "application/x-www-form-urlencoded"})
"""Media types that do not tell an array's form; the last is curl's default."""
_CHUNK_BYTES = 1 << 18
_SHAPE = r"^(\d{1,15}(,\d{1,15}){0,31})?$"

BODY: dict[str, Any] = {
    NPY: {"schema": {"type": "string", "format": "binary"}},
    RAW: {"schema": {"type": "string", "format": "binary"}},
    JSON: {"schema": {}},
}


class InvalidTensorError(DistError, code="invalid-tensor", status=400):
    """A body is not the array that the request describes."""


class InvalidCallError(DistError, code="invalid-call", status=422):
    """A call's arguments are invalid."""


class TensorTooLargeError(DistError, code="body-too-large", status=413):
    """An array is larger than RANKMESH_MAX_BODY."""


class MediaTypeError(DistError, code="unsupported-media-type", status=415):
    """A body's media type holds no array."""


class TensorIO:
    """Reads the array of a request, whose query may have dtype and shape, and writes that of its response."""

    def __init__(
        self, request: Request, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, limit: int
    ) -> None:
        self._request = request
        self._dtype = dtype
        self._shape = shape
        self._limit = limit
        self._form = NPY

    async def receive(self) -> Array:
        """Return the array of the request, in C order and writable.

        Raises:
            InvalidTensorError: the body is empty, or not the array that the request describes, or an encoded object.
            InvalidCallError: its dtype is not supported.
            MediaTypeError: its media type holds no array.
        """
        body = await _receive_body(self._request)
        if not body.nbytes and self._declared_bytes() != 0:
            raise InvalidTensorError(
                "the request has no body: send an array as a .npy file, as JSON, or its elements with "
                "?dtype=float32&shape=2,3"
            )
        array = self._read(body)
        if _has_record(array):
            raise InvalidTensorError("the array begins like an encoded object, and objects are not sent over HTTP")
        return array

    async def receive_or_allocate(self) -> Array:
        """Return memory for an array whose dtype and shape the request gives, or has an example of; see ``receive``."""
        body = await _receive_body(self._request)
        if body.nbytes:
            return self._read(body)
        if self._dtype is None or self._shape is None:
            raise InvalidCallError(
                "the array to receive is unknown: give ?dtype=float32&shape=2,3, or send an array like it as the body"
            )
        accepted = self._media_type(), self._request.headers.get("accept", "")
        self._form = next((form for form in (RAW, JSON) if form == accepted[0] or form in accepted[1]), NPY)
        return self.allocate(self._shape, self._dtype)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return memory for an array; raise TensorTooLargeError if it is too large, or there is no memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._limit:
            raise TensorTooLargeError(
                f"{display(dtype)}{list(shape)} is {nbytes} bytes, over the limit of {self._limit} (RANKMESH_MAX_BODY)"
            )
        try:
            return np.empty(shape, dtype)
        except MemoryError as error:
            raise TensorTooLargeError(f"there is no memory for {display(dtype)}{list(shape)}") from error
        except ValueError as error:
            raise InvalidCallError(f"no array has the shape {list(shape)}: {error}") from None

    def respond(self, array: Array, headers: Mapping[str, str] | None = None) -> Response:
        """Return the response with an array, in the form of the request's."""
        start = npy.header_of(array) if self._form == NPY else b""
        if self._form == JSON:
            start, elements = _json_of(array), memoryview(b"")
        else:
            elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

        async def pieces() -> AsyncIterator[bytes | memoryview]:
            yield start
            for begin in range(0, elements.nbytes, _CHUNK_BYTES):
                yield elements[begin : begin + _CHUNK_BYTES]

        described = {
            "Content-Length": str(len(start) + elements.nbytes),
            "RankMesh-Dtype": display(array.dtype),
            "RankMesh-Shape": ",".join(map(str, array.shape)),
        }
        return StreamingResponse(pieces(), headers=described | dict(headers or {}), media_type=self._form)

    def _read(self, body: Array) -> Array:
        media = self._media_type()
        if media == JSON:
            self._form = JSON
            return self._read_json(body)
        if media != NPY and media not in _UNSPECIFIC_TYPES:
            raise MediaTypeError(f"an array is sent as {NPY}, {JSON} or {RAW}, not as {media}")
        has_magic = bytes(body[: len(npy.MAGIC)]) == npy.MAGIC
        self._form = NPY if media == NPY or (has_magic and body.nbytes != self._declared_bytes()) else RAW
        return self._read_npy(body) if self._form == NPY else self._read_raw(body)

    def _media_type(self) -> str:
        return self._request.headers.get("content-type", "").partition(";")[0].strip().lower()

    def _read_npy(self, body: Array) -> Array:
        try:
            return npy.read(body, self._dtype)
        except ValueError as error:
            raise InvalidTensorError(str(error)) from None
        except TypeError as error:
            raise InvalidCallError(str(error)) from None

    def _read_json(self, body: Array) -> Array:
        dtype = np.dtype(np.float64) if self._dtype is None else self._dtype
        try:
            given = np.asarray(json_text.loads(body.tobytes()))
            if given.dtype.kind not in "bif" and given.dtype != np.uint64:
                raise ValueError("only numbers, true and false, in lists of equal lengths, make an array")
            with np.errstate(invalid="ignore", over="ignore"):
                array = given.astype(dtype)
            if dtype.kind in "biu" and not np.array_equal(array, given):
                raise ValueError(f"a number is none of {display(dtype)}")
        except (ValueError, OverflowError) as error:
            raise InvalidTensorError(f"the JSON is no array: {error}") from None
        if self._shape not in (None, array.shape):
            raise InvalidTensorError(f"the JSON has the shape {list(array.shape)}, not {list(self._shape or ())}")
        return array

    def _read_raw(self, body: Array) -> Array:
        dtype = self._dtype
        if dtype is None:
            raise InvalidTensorError("the body is no .npy file; for raw elements, give ?dtype=float32&shape=2,3")
        if self._shape is None:
            if body.nbytes % dtype.itemsize:
                raise InvalidTensorError(f"{body.nbytes} bytes are no whole number of {display(dtype)}")
            return body.view(dtype)
        if body.nbytes != self._declared_bytes():
            raise InvalidTensorError(
                f"{display(dtype)}{list(self._shape)} is {self._declared_bytes()} bytes, but the body has {body.nbytes}"
            )
        try:
            return body.view(dtype).reshape(self._shape)
        except ValueError as error:
            raise InvalidTensorError(f"no array has the shape {list(self._shape)}: {error}") from None

    def _declared_bytes(self) -> int | None:
        """Return the bytes of the array that the request describes, None if it has no dtype or shape."""
        return None if self._dtype is None or self._shape is None else math.prod(self._shape) * self._dtype.itemsize


def _json_of(array: Array) -> bytes:
    """Return an array as JSON; null is what JSON has no number for."""
    if array.dtype.kind == "c":
        raise InvalidCallError("JSON has no complex numbers: take the array as a .npy file")
    numbers = array if array.dtype.kind in "biu" else array.astype(np.float64)
    found = numbers.astype(object)
    found[~np.isfinite(numbers)] = None
    return json.dumps(found.tolist()).encode()


async def receive_empty_body(request: Request) -> None:
    """Raise InvalidCallError if a request has a body."""
    if (await _receive_body(request)).nbytes:
        raise InvalidCallError("this call takes no array: leave the body out")


def _has_record(array: Array) -> bool:
    """Return whether an array, or one of a stack, begins as the record of an object does."""
    octets = array.reshape(-1).view(np.uint8)
    if octets.size < RECORD_BYTES:
        return False
    rows = octets.reshape(array.shape[0] if array.ndim else 1, -1)
    starts = (rows if rows.shape[1] >= RECORD_BYTES else octets[np.newaxis])[:, : len(MAGIC)]
    return bool((starts == np.frombuffer(MAGIC, np.uint8)).all(axis=1).any())


async def _receive_body(request: Request) -> Array:
    """Return a request's body; its memory grows with the bytes that have arrived."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
    except MemoryError:
        raise TensorTooLargeError(f"there is no memory for {len(body)} bytes") from None
    return np.frombuffer(body, np.uint8)


DtypeQuery = Annotated[
    str | None,
    Query(
        alias="dtype",
        max_length=32,
        description="Element type of raw elements, of the array to receive, or of a .npy file that cannot express it "
        f"(bfloat16 and its like): {', '.join(FROM_NAME)}.",
    ),
]
ShapeQuery = Annotated[
    str | None,
    Query(
        alias="shape",
        pattern=_SHAPE,
        description="Shape of raw elements, or of the array to receive: `2,3`. A .npy file has its own.",
    ),
]


async def _tensors(request: Request, dtype: DtypeQuery = None, shape: ShapeQuery = None) -> TensorIO:
    if dtype is not None and dtype not in FROM_NAME:
        raise InvalidCallError(f"there is no dtype {dtype!r}; there are {', '.join(FROM_NAME)}")
    return TensorIO(
        request,
        None if dtype is None else FROM_NAME[dtype],
        None if shape is None else tuple(int(length) for length in re.findall(r"\d+", shape)),
        request.app.state.max_tensor,
    )


TensorDep = Annotated[TensorIO, Depends(_tensors)]
