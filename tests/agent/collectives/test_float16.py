"""float16 through the vector loops, against NumPy's own conversion."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rankmesh_agent.collectives import float16

EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE = EVERY[np.isfinite(EVERY)]


def narrowed(wide: np.ndarray) -> np.ndarray:
    out = np.empty(wide.size, np.float16)
    with np.errstate(all="ignore"):
        float16.narrow(wide.copy(), out)
    return out.view(np.uint16)


def by_numpy(wide: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return wide.astype(np.float16).view(np.uint16)


HALVES = {"finite": FINITE, "all": EVERY, "back": FINITE[::-1].copy(), "none": EVERY[:0], "few": EVERY[:99]}


@pytest.mark.parametrize("halves", HALVES.values(), ids=HALVES)
def test_widening_every_number(halves):
    out = np.empty(halves.size, np.float32)
    float16.widen(halves, out)
    np.testing.assert_array_equal(out.view(np.uint32), halves.astype(np.float32).view(np.uint32))


def next_half(halves: np.ndarray) -> np.ndarray:
    """Return the next larger numbers, as if float16 went on behind its largest."""
    with np.errstate(all="ignore"):
        larger = np.nextafter(halves, np.float16(np.inf)).astype(np.float64)
    larger[np.isinf(larger)] = 65536
    return larger


@pytest.mark.parametrize("fraction", range(4))
def test_narrowing_every_half_and_what_lies_between(fraction):
    """Every float16, and one, two and three quarters of the way to the next one: the tie and both its sides."""
    low = FINITE[:-1].astype(np.float64)
    high = next_half(FINITE[:-1])
    wide = (low + (high - low) * fraction / 4).astype(np.float32)
    np.testing.assert_array_equal(narrowed(wide), by_numpy(wide))


def test_narrowing_next_to_every_tie():
    low = FINITE[FINITE >= 0]
    tie = ((low.astype(np.float64) + next_half(low)) / 2).astype(np.float32)
    for wide in (np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(1e9))):
        np.testing.assert_array_equal(narrowed(wide), by_numpy(wide))
        np.testing.assert_array_equal(narrowed(-wide), by_numpy(-wide))


def test_narrowing_random_bits():
    bits = np.random.default_rng(7).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(narrowed(bits.view(np.float32)), by_numpy(bits.view(np.float32)))
    for exponent in range(90, 143):  # a piece of each magnitude, without those that NumPy has to see to
        wide = ((bits & 0x807FFFFF) | exponent << 23).view(np.float32)[: 1 << 15]
        np.testing.assert_array_equal(narrowed(wide), by_numpy(wide))


@pytest.mark.parametrize("value", [0.0, -0.0, 65519.996, -65520.0, 1e30, np.inf, -np.inf, np.nan, 1e-45, -1e-40])
def test_narrowing_special_values(value):
    wide = np.full(70_000, 1.5, np.float32)
    wide[[0, 40_000, -1]] = value
    np.testing.assert_array_equal(narrowed(wide), by_numpy(wide))


def added(parts: list[np.ndarray], divisor: int = 1) -> np.ndarray:
    out = np.empty(parts[0].size, np.float16)
    with np.errstate(all="ignore"):
        float16.add(parts, out, divisor)
    return out


def assert_added(parts: list[np.ndarray], divisor: int = 1) -> None:
    """Compare with NumPy bit for bit, but for the bits of NaN."""
    out = added(parts, divisor)
    with np.errstate(all="ignore"):
        wide = parts[0].astype(np.float32)
        for part in parts[1:]:
            wide += part
        want = (wide / np.float32(divisor)).astype(np.float16)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(out[number].view(np.uint16), want[number].view(np.uint16))
    assert np.isnan(out[~number]).all()


@pytest.mark.parametrize("divisor", [1, 2, 4, 64, 1 << 13])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_sums_of_every_magnitude(count, divisor):
    """Random bits of each magnitude, subnormal ones too, so that many sums are ties or become subnormal."""
    rng = np.random.default_rng([count, divisor])
    for magnitude in range(31):
        parts = [rng.choice(FINITE, 1 << 13) for _ in range(count)]
        for part in parts:
            bits = part.view(np.uint16)
            bits &= 0x83FF
            bits |= magnitude << 10
        assert_added(parts, divisor)


@pytest.mark.parametrize("divisor", [1, 8])
@pytest.mark.parametrize("other", [0.0, -0.0, 2.0**-24, -(2.0**-14), 1.0, -1.0, 2047.0, 15.99, 16.0, -65504.0, np.nan])
def test_sums_of_every_number_and_another(other, divisor):
    """The largest with less than 16 are the largest, with 16 they are infinite: a tie."""
    assert_added([FINITE, np.full(FINITE.size, other, np.float16)], divisor)
    assert_added([EVERY, np.full(EVERY.size, other, np.float16)], divisor)


@pytest.mark.parametrize("most", [65504.0, 65520.0])
def test_large_numbers_that_cancel(most):
    """Their magnitudes' sum is infinite, the sums are not, but for one."""
    rng = np.random.default_rng(3)
    large = FINITE[np.abs(FINITE) >= 32768]
    parts = [np.abs(rng.choice(large, 100_000)), -np.abs(rng.choice(large, 100_000))]
    parts[0][70_000], parts[1][70_000] = 65504, most - 65504
    assert_added(parts)


@pytest.mark.parametrize("among", [1.0, -1.0])
@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, -np.nan])
def test_sums_with_infinity_and_nan(special, among):
    """The other part has what would bring back a number as large as infinity looks."""
    for place in (0, 1):
        parts = [np.full(70_000, value, np.float16) for value in (among, among)]
        parts[place][[0, 40_000, -1]] = special
        parts[1 - place][[0, 40_000]] = np.copysign(65504, -special)
        parts[1 - place][-1] = -special
        assert_added(parts)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sum_into_one_of_its_parts(place):
    parts = [np.full(100_000, value, np.float16) for value in (1.5, 2.25, -8)]
    float16.add(parts, parts[place])
    assert (parts[place] == -4.25).all()


def test_sums_of_unaligned_parts():
    parts = [np.frombuffer(b"\0" + FINITE.tobytes(), np.uint8)[1:].view(np.float16) for _ in range(2)]
    assert_added(parts)


def test_threads_do_not_share_scratch():
    wide = [np.random.default_rng(seed).normal(size=100_000).astype(np.float32) for seed in range(4)]
    right = []

    def convert(mine: np.ndarray) -> None:
        right.extend(np.array_equal(narrowed(mine), by_numpy(mine)) for _ in range(20))

    threads = [threading.Thread(target=convert, args=(mine,)) for mine in wide]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 80
