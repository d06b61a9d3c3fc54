"""CuPy's arrays: their elements are read and written on the current stream."""

from __future__ import annotations

import operator
import re
from typing import Any

import numpy as np

from cupy import _memory, _streams
from cupy.cuda import runtime
from cupy.cuda.device import Device
from cupy.cuda.memory import MemoryPointer, UnownedMemory, alloc
from cupy.cuda.stream import get_current_stream

_DLPACK_CUDA = 2
_NO_KERNELS = re.compile(r"float[468]_|u?int[24]$|float128|complex256")


class ndarray:  # noqa: N801
    """An array on a GPU, which NumPy cannot read."""

    __module__ = "cupy"

    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, strides: Any = None, order: str = "C"
    ) -> None:
        usual = np.empty(shape, dtype, order)  # type: ignore[call-overload]  # never touched, so it costs nothing
        self.shape, self.dtype, self.size, self.ndim = usual.shape, usual.dtype, usual.size, usual.ndim
        self.itemsize, self.nbytes = usual.itemsize, usual.nbytes
        self.strides: tuple[int, ...] = usual.strides if strides is None else tuple(strides)
        self.data = alloc(self.nbytes) if memptr is None else memptr
        self.flags = np.lib.stride_tricks.as_strided(
            np.empty(1, f"V{self.dtype.itemsize}"), self.shape, self.strides
        ).flags

    # What it is

    @property
    def device(self) -> Device:
        return Device(self.data.device_id)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr, False),
            "stream": get_current_stream().ptr or runtime.streamLegacy,
        }

    def __array__(self, dtype: Any = None) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        return _computed(ufunc, *inputs)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    # Host memory

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self.data.device_id

    def __dlpack__(
        self, *, stream: int | None = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        """Return what from_dlpack takes: no capsule, so it is good for the double alone."""
        _ordered(get_current_stream().ptr, runtime.streamLegacy if stream is None else stream)
        return self

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        made = np.empty(self.shape, self.dtype, order=order) if out is None else out  # type: ignore[call-overload]
        if not self.flags.c_contiguous:
            _for_kernels(self.dtype)
        read = self._reader()
        mark = _queue(stream).enqueue(lambda: np.copyto(made, read()))
        if blocking:
            mark.wait()
            _streams.raise_failure()
        return made

    def set(self, arr: Any, stream: Any = None) -> None:
        data, write = np.array(arr, self.dtype).reshape(self.shape), self._reader()
        _queue(stream).enqueue(lambda: np.copyto(write(), data))

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __repr__(self) -> str:
        return repr(self.get())

    # Views and copies

    def _at(self, view: np.ndarray[Any, Any]) -> ndarray:
        """Return the part of this array that a NumPy view of the same memory shows."""
        offset = int(view.__array_interface__["data"][0]) - self.data.ptr
        return ndarray(view.shape, view.dtype, self.data + offset if view.size else self.data, view.strides)

    def _reader(self) -> Any:
        """Return a function that gives the elements to NumPy, when a stream has come to it."""
        place = self.data.ptr, self.shape, self.dtype, self.strides
        return lambda: _memory.view(*place)

    def __getitem__(self, slices: Any) -> ndarray:
        index = slices if isinstance(slices, tuple) else (slices,)
        return self._at(self._reader()()[(*index, ...) if Ellipsis not in index else index])

    def __setitem__(self, slices: Any, value: Any) -> None:
        to = self[slices]
        if not isinstance(value, ndarray):
            if np.ndim(value):
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            _for_kernels(to.dtype)
        elif (value.shape, value.strides, value.dtype) != (to.shape, to.strides, to.dtype) or not to.flags.c_contiguous:
            _for_kernels(to.dtype, value.dtype)
        write, read = to._reader(), _reader_of(value)
        _queue().enqueue(lambda: np.copyto(write(), read(), casting="unsafe"))

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

    @property
    def T(self) -> ndarray:  # noqa: N802
        return self.transpose()

    def transpose(self, *axes: Any) -> ndarray:
        return self._at(self._reader()().transpose(*axes))

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> ndarray:
        source = self if self.flags.c_contiguous else self.copy()
        return source._at(source._reader()().reshape(*shape))

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1)

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        return self._at(self._reader()().view(dtype or self.dtype))

    def copy(self, order: str = "C") -> ndarray:
        return self.astype(self.dtype, order)

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        made = ndarray(self.shape, dtype, order="F" if order == "F" else "C")
        made[...] = self
        return made

    def fill(self, value: Any) -> None:
        self[...] = value

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return _computed(lambda array: np.sum(array, axis, dtype, keepdims=keepdims), self)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return _computed(lambda array: np.all(array, axis, keepdims=keepdims), self)


def _operator(function: Any, swapped: bool = False, in_place: bool = False) -> Any:
    def apply(self: ndarray, other: Any) -> ndarray:
        if in_place:
            self[...] = function(self, other)
            return self
        return _computed(function, *((other, self) if swapped else (self, other)))

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor"):
    _function = getattr(operator, f"__{_name}__")
    setattr(ndarray, f"__{_name}__", _operator(_function))
    setattr(ndarray, f"__r{_name}__", _operator(_function, swapped=True))
    setattr(ndarray, f"__i{_name}__", _operator(_function, in_place=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ndarray, f"__{_name}__", _operator(getattr(operator, f"__{_name}__")))


def _computed(function: Any, *inputs: Any) -> ndarray:
    """Return a new array: what a function of NumPy arrays gives, on the current stream."""
    for one in inputs:
        if isinstance(one, np.ndarray):
            raise TypeError(f"Unsupported type {type(one)}")
    _for_kernels(*(one.dtype for one in inputs if isinstance(one, ndarray)))
    samples = [np.ones(one.shape, one.dtype) if isinstance(one, ndarray) else one for one in inputs]
    sample = np.asarray(function(*samples))
    made = ndarray(sample.shape, sample.dtype)
    write, readers = made._reader(), [_reader_of(one) for one in inputs]

    def work() -> None:
        with np.errstate(all="ignore"):
            np.copyto(write(), function(*(read() for read in readers)))

    _queue().enqueue(work)
    return made


def _for_kernels(*dtypes: np.dtype[Any]) -> None:
    """Raise the error of CuPy for element types that its kernels cannot read: it moves them as bytes alone."""
    for dtype in dtypes:
        if _NO_KERNELS.match(dtype.name):
            raise ValueError(f"Unsupported dtype {dtype}")


def _ordered(first: int, then: int) -> None:
    """Have a stream wait for what is on another one."""
    if first != then:
        event = runtime.eventCreate()
        runtime.eventRecord(event, first)
        runtime.streamWaitEvent(then, event)
        runtime.eventDestroy(event)


def _reader_of(value: Any) -> Any:
    """Return a function that gives NumPy what an array holds then, or anything else as it is."""
    if isinstance(value, ndarray):
        return value._reader()
    return lambda: value


def _queue(stream: Any = None) -> _streams.Queue:
    return _streams.stream((stream or get_current_stream()).ptr)


# Making arrays


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    made = ndarray(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order=order)
    made.fill(fill_value)
    return made


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    made = ndarray(shape, dtype, order=order)
    if made.size:
        runtime.memsetAsync(made.data.ptr, 0, made.nbytes, get_current_stream().ptr)
    return made


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def empty_like(prototype: ndarray, dtype: Any = None) -> ndarray:
    return ndarray(prototype.shape, dtype or prototype.dtype)


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    return zeros(a.shape, dtype or a.dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    first: Any = 0 if stop is None else start
    end = start if stop is None else stop
    return array(np.arange(first, end, step, dtype))  # type: ignore[call-overload]


def array(
    obj: Any,
    dtype: Any = None,
    copy: bool | None = True,
    order: str = "K",
    subok: bool = False,
    ndmin: int = 0,
    *,
    blocking: bool = False,
) -> ndarray:
    if not isinstance(obj, ndarray) and hasattr(obj, "__cuda_array_interface__"):
        obj = _adopted(obj)
    if isinstance(obj, ndarray):
        return obj.astype(obj.dtype if dtype is None else dtype, copy=bool(copy))
    found = np.array(obj, dtype, ndmin=ndmin)
    made = ndarray(found.shape, found.dtype, order="F" if order == "F" else "C")
    made.set(found)
    return made


def asarray(
    a: Any, dtype: Any = None, order: str | None = None, *, copy: bool | None = None, blocking: bool = False
) -> ndarray:
    return array(a, dtype, copy=copy, order=order or "K", blocking=blocking)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    found = asarray(a, dtype)
    return found if found.flags.c_contiguous else found.copy()


def concatenate(tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> ndarray:
    return _computed(lambda *arrays: np.concatenate(arrays, axis), *tup)


def array_equal(a1: ndarray, a2: ndarray, equal_nan: bool = False) -> ndarray:
    if a1.shape != a2.shape:
        return array(False)
    return _computed(lambda one, other: np.array_equal(one, other, equal_nan), a1, a2)


def from_dlpack(array: Any, *, device: Any = None, copy: Any = None) -> ndarray:
    return array.__dlpack__(stream=get_current_stream().ptr or runtime.streamLegacy)


def _adopted(foreign: Any) -> ndarray:
    """Return an array over memory that an object of another library keeps, after what is on the stream it names."""
    told = foreign.__cuda_array_interface__
    pointer = told["data"][0]
    segment = _memory.find(pointer)
    device = segment.gpu.number if segment and segment.gpu else -1
    memory = UnownedMemory(pointer, 0, foreign, device)
    if told.get("stream"):
        _ordered(told["stream"], get_current_stream().ptr)
    return ndarray(told["shape"], np.dtype(told["typestr"]), MemoryPointer(memory, 0), told.get("strides"))
