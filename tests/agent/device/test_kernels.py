"""The kernels' arithmetic, compiled for the processor, against the arithmetic of reductions."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cpu_kernels import COMPILER, CpuKernel, CpuModule
from support.oracle import NARROW, ops_of

from rankmesh_agent.collectives.reduction import combine, premultiplied
from rankmesh_agent.device.kernels import LARGE_CAPACITY, OPTIONS, SMALL_CAPACITY, Kernels, entry, prelude, source
from rankmesh_agent.wire.dtypes import COMPLEX32, FROM_CODE, FROM_NAME, OPAQUE, display, family
from rankmesh_agent.wire.ops import ReduceOp

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

LONG = [np.dtype(np.longdouble), np.dtype(np.clongdouble)]
DTYPES = [dtype for dtype in FROM_CODE.values() if dtype not in OPAQUE and dtype not in LONG]
SCALABLE = [dtype for dtype in DTYPES if family(dtype) != "bool"]
CASES = [(dtype, op) for dtype in DTYPES for op in sorted(ops_of(dtype))]
TEXTS = {source(*case): case for case in [*CASES, *((dtype, None) for dtype in SCALABLE)]}
ROOMY = [(np.dtype(np.uint8), ReduceOp.BOR, LARGE_CAPACITY), (FROM_NAME["bfloat16"], ReduceOp.SUM, LARGE_CAPACITY)]
MULTIPROCESSORS = 1
FLOAT32, BFLOAT16 = np.dtype(np.float32), FROM_NAME["bfloat16"]
FUSED = np.any(np.multiply(np.full(8, 1 + 2**-12 + 1j, np.complex64), np.full(8, 1 + 2**-12 + 2**-11j, np.complex64)))
"""Whether NumPy multiplies and adds at once here, where it multiplies complex numbers; the kernels do everywhere."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, CpuKernel]:
    """Kernels by their text, compiled all at once: one at a time would take minutes."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    wanted = {text: (*case, SMALL_CAPACITY) for text, case in TEXTS.items()} | {source(*case): case for case in ROOMY}
    names = {text: f"kernel_{number}" for number, text in enumerate(wanted)}
    module = CpuModule(prelude() + "".join(entry(*case, names[text]) for text, case in wanted.items()))
    return {text: module.get_function(name) for text, name in names.items()}


Launches = list[tuple[int, int]]
"""Launches, each with its blocks and its stream."""


@pytest.fixture
def launches(compiled: dict[str, CpuKernel], monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Stand in for CuPy: its kernels run on the processor."""
    launches: Launches = []

    class Module:
        def load(self, code: str) -> None:
            self._code = code

        def get_function(self, name: str) -> Any:
            assert name == "run"
            return self._launch

        def _launch(self, grid: tuple[int], block: tuple[int], arguments: tuple[Array], *, stream: Any) -> None:
            launches.append((grid[0], stream.ptr))
            compiled[self._code](grid, block, arguments)

    def compile_using_nvrtc(code: str, options: tuple[str, ...]) -> tuple[str, None]:
        assert options == OPTIONS
        return code, None

    compiler = SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(Module=Module, compiler=compiler))
    return launches


@pytest.fixture
def run(launches: Launches) -> Kernels:
    return Kernels(MULTIPROCESSORS)


def placed(like: Array, offset: int = 0) -> Array:
    """Return a copy whose address leaves a remainder by 16, between bytes that must stay as they are."""
    memory = np.full(like.nbytes + 64, 0xA5, np.uint8)
    begin = 16 - memory.ctypes.data % 16 + 16 + offset
    array = np.frombuffer(memory, like.dtype, like.size, begin)
    array[:] = like
    return array


def assert_untouched_around(array: Array) -> None:
    memory = array.base.obj if isinstance(array.base, memoryview) else array.base
    begin = array.ctypes.data - memory.ctypes.data
    assert (memory[:begin] == 0xA5).all()
    assert (memory[begin + array.nbytes :] == 0xA5).all()


def part_of(dtype: DType) -> DType:
    """Return the dtype of a complex number's parts, and of other numbers their own."""
    if dtype == COMPLEX32:
        return np.dtype(np.float16)
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def anything(dtype: DType, rank: int, count: int) -> Array:
    """Return all kinds of numbers: any bits, moderate ones, and extremes."""
    random = np.random.default_rng([rank, count, dtype.num])
    if dtype.kind == "b":
        return random.integers(0, 2, count).astype(bool)
    part = part_of(dtype)
    many = count * dtype.itemsize // part.itemsize
    bits = np.frombuffer(random.bytes(many * part.itemsize), part).copy()
    if part.kind in "iu":
        limits = np.iinfo(part)
        return np.where(
            random.random(many) < 0.2, random.choice(np.array([limits.min, limits.max, 0, 1], part), many), bits
        )
    with np.errstate(all="ignore"):
        moderate = (random.normal(size=many) * 2.0 ** random.integers(-8, 8, many)).astype(np.float32).astype(part)
        extremes = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, -3e38], np.float32).astype(part)
    kind = random.random(many)
    chosen = np.where(kind < 0.6, moderate, np.where(kind < 0.8, random.choice(extremes, many), bits))
    return chosen.astype(part).view(dtype)


def assert_same(got: Array, wanted: Array) -> None:
    """Compare bit for bit, but for NaN, whose bits are another processor's choice."""
    part = part_of(got.dtype)
    got, wanted = got.copy().view(part), wanted.copy().view(part)
    unsigned = f"u{part.itemsize}"
    same = got.view(unsigned) == wanted.view(unsigned)
    if family(part) == "float":
        same |= (got != got) & (wanted != wanted)
    wrong = np.flatnonzero(~same)
    assert wrong.size == 0, f"{wrong.size} differ, first [{wrong[0]}]: {got[wrong[0]]!r}, not {wanted[wrong[0]]!r}"


def combined(op: ReduceOp, parts: list[Array]) -> Array:
    out = np.empty_like(parts[0])
    with np.errstate(all="ignore"):
        combine(op, parts, out)
    return out


def skip_where_numpy_rounds_otherwise(dtype: DType, op: ReduceOp | None) -> None:
    if family(dtype) == "complex" and op in (ReduceOp.PRODUCT, None) and not FUSED:
        pytest.skip("NumPy rounds complex products otherwise on this processor")


def addresses(arrays: list[Array]) -> list[int]:
    return [array.ctypes.data for array in arrays]


@pytest.mark.parametrize("count", [1, 7, 1023])
@pytest.mark.parametrize(("dtype", "op"), CASES, ids=lambda of: of.name if isinstance(of, ReduceOp) else display(of))
def test_a_reduction_is_what_the_host_makes_it(run, dtype, op, count):
    skip_where_numpy_rounds_otherwise(dtype, op)
    part = part_of(dtype).itemsize
    alike = 3 * dtype.itemsize % 16 or part
    for members in (1, 2, 3, 4, 8):
        for offsets in ([0], [alike], [0, part, alike]):
            parts = [placed(anything(dtype, rank, count), offsets[rank % len(offsets)] % 16) for rank in range(members)]
            wanted = combined(op, parts)
            other = placed(parts[0], offsets[-1])
            out = [other, parts[-1]]  # the last is reduced in place
            run.reduce(op, dtype, addresses(parts), addresses(out), count, 0)
            for array in out:
                assert_same(array, wanted)
                assert_untouched_around(array)


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=lambda of: of.name if isinstance(of, ReduceOp) else display(of))
def test_threads_take_several_packs_of_a_large_array(run, dtype, op):
    skip_where_numpy_rounds_otherwise(dtype, op)
    count = 5 * 8 * MULTIPROCESSORS * 256 * 16 // dtype.itemsize + 13
    parts = [placed(anything(dtype, rank, count), part_of(dtype).itemsize) for rank in range(2)]
    wanted = combined(op, parts)
    run.reduce(op, dtype, addresses(parts), addresses(parts), count, 0)
    for part in parts:
        assert_same(part, wanted)
        assert_untouched_around(part)


@pytest.mark.parametrize("dtype", sorted(NARROW, key=display), ids=display)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN], ids=lambda op: op.name)
def test_all_numbers_of_narrow_formats(run, op, dtype):
    everything = np.arange(1 << 16, dtype=np.uint16)
    if dtype.itemsize == 1:  # every pair
        parts = [everything.astype(np.uint8), (everything >> 8).astype(np.uint8), np.full(1 << 16, 0x38, np.uint8)]
    else:
        random = np.random.default_rng(0)
        parts = [everything, random.permutation(everything), random.permutation(everything)]
    parts = [placed(part.view(dtype)) for part in parts]
    for members in (2, 3):
        out = placed(parts[0])
        run.reduce(op, dtype, addresses(parts[:members]), addresses([out]), out.size, 0)
        assert_same(out, combined(op, parts[:members]))


@pytest.mark.parametrize("dtype", SCALABLE, ids=display)
def test_scaling_is_what_the_host_makes_it(run, dtype):
    skip_where_numpy_rounds_otherwise(dtype, None)
    factors: list[complex] = [0.3, -1 / 3, 3, 1e-6, 1e30]
    if family(dtype) == "complex":
        factors += [0.3 - 0.7j]
    if family(dtype) == "int":
        limits = np.iinfo(dtype)
        factors = [int(limits.max), int(limits.min), 3]
    for factor in factors:
        for count in (1, 7, 1023):
            array = placed(anything(dtype, 0, count), part_of(dtype).itemsize)
            wanted = premultiplied(factor, array)
            out = placed(array)
            run.scale(factor, dtype, array.ctypes.data, out.ctypes.data, count, 0)
            run.scale(factor, dtype, array.ctypes.data, array.ctypes.data, count, 0)
            assert_same(out, wanted)
            assert_same(array, wanted)
            assert_untouched_around(array)


@pytest.mark.parametrize("dtype", [*DTYPES, *LONG, *sorted(OPAQUE, key=str)], ids=display)
def test_one_array_is_copied_whatever_it_is(run, dtype):
    array = np.frombuffer(np.random.default_rng(0).bytes(100 * dtype.itemsize), dtype)
    out = [placed(np.zeros_like(array), offset) for offset in (0, 3, 0)]
    run.reduce(ReduceOp.SUM, dtype, addresses([array]), addresses(out), array.size, 0)
    assert [copy.tobytes() for copy in out] == [array.tobytes()] * 3


def test_an_average_is_divided_by_the_members(run):
    array = placed(np.array([3, 5], np.float32))
    run.reduce(ReduceOp.AVG, FLOAT32, addresses([array]), addresses([array]), 2, 0, members=4)
    run.reduce(ReduceOp.AVG, FLOAT32, addresses([array, array]), addresses([array]), 2, 0, members=8)
    assert array.tolist() == [3 / 16, 5 / 16]


def test_the_factors_are_in_the_arrays_when_premultiplied_sums_are_added(run):
    array = placed(np.array([3, 5], np.float32))
    run.reduce(ReduceOp.PREMUL_SUM, FLOAT32, addresses([array, array]), addresses([array]), 2, 0)
    assert array.tolist() == [6, 10]


def test_more_arrays_than_usual(run):
    parts = [placed(anything(BFLOAT16, rank, 100)) for rank in range(250)]
    wanted = combined(ReduceOp.SUM, parts)
    run.reduce(ReduceOp.SUM, BFLOAT16, addresses(parts), addresses(parts), 100, 0)
    for part in parts:
        assert_same(part, wanted)
    with pytest.raises(ValueError, match="500 arrays at most, not 501"):
        run.reduce(ReduceOp.SUM, BFLOAT16, [0] * 251, addresses(parts), 100, 0)


def test_a_launch_is_on_the_stream_and_no_larger_than_the_device(run, launches):
    array = placed(np.ones(1 << 17, np.float32))
    for count in (1, 5000, array.size):
        run.reduce(ReduceOp.SUM, FLOAT32, addresses([array, array]), addresses([array]), count, 77)
    assert launches == [(1, 77), (5, 77), (8 * MULTIPROCESSORS, 77)]
    assert (array[:1] == 8).all()
    assert (array[1:5000] == 4).all()
    assert (array[5000:] == 2).all()


def test_what_is_empty_is_not_launched(run, launches):
    run.reduce(ReduceOp.SUM, FLOAT32, [16, 32], [16], 0, 0)
    run.reduce(ReduceOp.SUM, FLOAT32, [16, 32], [], 5, 0)
    run.scale(2, FLOAT32, 16, 16, 0, 0)
    assert not launches


@pytest.mark.parametrize("dtype", LONG, ids=display)
def test_gpus_have_no_long_numbers(dtype):
    with pytest.raises(TypeError, match=f"GPUs have no arithmetic for {display(dtype)}; use (float64|complex128)"):
        source(dtype, ReduceOp.SUM)


def test_addresses_between_elements_are_refused_before_they_break_the_device():
    with pytest.raises(ValueError, match="arrays of float32 in a GPU's memory have to lie at multiples of 4 bytes"):
        Kernels(1).reduce(ReduceOp.SUM, FLOAT32, [16, 32], [18], 1, 0)
