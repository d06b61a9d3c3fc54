"""A hostile peer that knows the credential: mutated and reordered frames, by hypothesis, as often as a setting says."""

from __future__ import annotations

import gc
import os
import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("RANKMESH_FUZZ_EXAMPLES", "400"))
"""Sequences of frames of each test; the same ones in every run."""
BATCH = 20
"""Sequences that one seed gives: hypothesis takes longer to draw a seed than most of them take."""
WORDS = (0, 1, 255, (1 << 31) - 1, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)

fuzzed = settings(
    max_examples=max(1, EXAMPLES // BATCH),
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


seeds = st.integers(0, (1 << 64) - 1)


def sequences_like(corpus: Sequence[bytes], fixed: int = 0) -> st.SearchStrategy[list[list[bytes]]]:
    """BATCH sequences of frames of a corpus, in any order, some of them mutated.

    Args:
        corpus: valid frames.
        fixed: bytes at the beginning of a frame that are mostly left as they are, such as a magic number.
    """

    def batch(seed: int) -> list[list[bytes]]:
        random = Random(seed)
        return [_sequence(random, corpus, fixed) for _ in range(BATCH)]

    return seeds.map(batch)


def _sequence(random: Random, corpus: Sequence[bytes], fixed: int) -> list[bytes]:
    frames = [bytearray(random.choice(corpus)) for _ in range(random.randint(1, 8))]
    for frame in frames:
        while frame and random.random() < 0.4:
            _mutate(random, frame, 0 if random.random() < 0.05 else fixed)
    return [bytes(frame) for frame in frames]


def _mutate(random: Random, frame: bytearray, begin: int) -> None:
    """Cut a frame, set an aligned field to an extreme value, or change a byte; mostly in its first bytes."""
    kind, size = random.random(), random.choice((1, 2, 4, 8))
    end = len(frame) if random.random() < 0.3 else min(len(frame), 96)
    at = random.randrange(min(begin, end - 1), end)
    if kind < 0.03:
        del frame[at:]
    elif kind < 0.5:
        at -= at % size
        frame[at : at + size] = (random.choice(WORDS) & (1 << 8 * size) - 1).to_bytes(size, "big")[: len(frame) - at]
    else:
        frame[at] = random.randrange(256)


@contextmanager
def memory_within(nbytes: int) -> Iterator[None]:
    """Assert that the block makes the process's resident memory grow by no more than ``nbytes`` at any time."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident("VmRSS")
    yield
    peak = _resident("VmHWM") - before
    print(f"peak {peak / (1 << 20):.1f} MiB")
    assert peak < nbytes, f"{peak >> 20} MiB were used, at most {nbytes >> 20} are allowed"


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@contextmanager
def allocations_within(nbytes: int) -> Iterator[None]:
    """Assert that the block allocates no more than ``nbytes`` at any time, used or not."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes, f"{peak >> 20} MiB were allocated, at most {nbytes >> 20} are allowed"


class Script:
    """A socket whose peer has sent some bytes and then closed its end; what is sent to it is dropped."""

    family = 0

    def __init__(self, *received: bytes) -> None:
        self._received = memoryview(b"".join(received))

    def recv(self, size: int, flags: int = 0) -> bytes:
        found = bytes(self._received[:size])
        if not flags:
            self._received = self._received[size:]
        return found

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0) -> int:
        found = self.recv(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def send(self, data: Any, flags: int = 0) -> int:
        return len(data)

    def sendmsg(self, buffers: Sequence[Any], *_: Any) -> int:
        return sum(map(len, buffers))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None
