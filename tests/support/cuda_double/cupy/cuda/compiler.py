"""NVRTC, which is the compiler of the processor here: its result is the text, compiled at the first launch."""

from __future__ import annotations

from cupy import _gpus

_KNOWN = {"-std=c++14", "-fmad=false"}


class CompileException(Exception):
    def __init__(self, msg: str, source: str, name: str, options: tuple[str, ...], backend: str = "nvrtc") -> None:
        super().__init__()
        self._msg = msg

    def __str__(self) -> str:
        return self._msg


def compile_using_nvrtc(source: str, options: tuple[str, ...] = ()) -> tuple[bytes, None]:
    if "nvrtc" in _gpus.WITHOUT:
        raise RuntimeError(
            "CuPy failed to load libnvrtc.so.13: OSError: libnvrtc.so.13: cannot open shared object file"
        )
    unknown = set(options) - _KNOWN
    if unknown:  # what g++ does is what NVRTC does with these alone
        raise CompileException(f"error: unrecognized option {min(unknown)} found", source, "kern.cu", options)
    return source.encode(), None
