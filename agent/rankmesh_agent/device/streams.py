"""Current streams of CuPy and of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rankmesh_agent.device import runtime


class CupyStreams:
    """CuPy's current streams."""

    def current(self, device: int) -> int:
        return runtime.current_stream(device)

    @contextlib.contextmanager
    def using(self, device: int, stream: int) -> Iterator[None]:
        with runtime.DeviceGuard(device), runtime.stream_object(stream):
            yield


class TorchStreams:
    """torch's current streams."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def current(self, device: int) -> int:
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    @contextlib.contextmanager
    def using(self, device: int, stream: int) -> Iterator[None]:
        library = self._torch.cuda
        with library.device(device), library.stream(library.ExternalStream(stream, device=device)):
            yield
