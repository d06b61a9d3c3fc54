"""The tracebacks of ranks: the user's frames, and RankMesh's as one line."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Callable

import numpy as np
import pytest

import rankmesh as dist
from rankmesh._launcher.tracebacks import folded, place, print_exception
from rankmesh_agent.wire.errors import RankFailedError


def error_of(call: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as raised:  # noqa: PT011  # any error
        call()
    return raised.value


def inside() -> None:
    """Raise an error inside RankMesh."""
    dist.all_reduce(np.ones(1), group="none")  # type: ignore[arg-type]


def chained() -> None:
    try:
        inside()
    except TypeError as error:
        raise ValueError("a step failed") from error


def in_a_library() -> None:
    np.linalg.inv(np.zeros((2, 2)))


def test_frames_of_rankmesh_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKMESH_DEBUG", raising=False)
    error = error_of(chained)
    text = folded(error)
    assert "rankmesh/_collectives" not in text
    assert len(re.findall(r"\n  \(\d+ frames inside RankMesh; RANKMESH_DEBUG=INFO shows them\)\n", text)) == 1
    lines = [line for line in traceback.format_exception(error) if "in inside\n" in line or "in chained\n" in line]
    assert len(lines) == 3
    assert all(line in text for line in lines)
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("\nValueError: a step failed\n")


@pytest.mark.parametrize("call", [chained, in_a_library])
def test_the_whole_traceback(call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With RANKMESH_DEBUG, and of what a library raises that RankMesh does not call."""
    monkeypatch.setenv("RANKMESH_DEBUG", "OFF" if call is in_a_library else "INFO")
    error = error_of(call)
    assert folded(error) == "".join(traceback.format_exception(error))


def test_the_line_of_the_user() -> None:
    line = inside.__code__.co_firstlineno + 2
    assert place(error_of(inside)) == f"test_tracebacks.py:{line} in inside"
    assert place(ValueError("not raised")) == ""


def lost() -> None:
    raise RankFailedError("rank 1 (host, pid 7) failed", ranks=[1])


def lost_meanwhile() -> None:
    try:
        in_a_library()
    except np.linalg.LinAlgError:
        lost()


def test_a_rank_that_ends_because_of_another_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = {}
    for call, debug in itertools.product((lost, lost_meanwhile), ("OFF", "INFO")):
        monkeypatch.setenv("RANKMESH_DEBUG", debug)
        error = error_of(call)
        print_exception(type(error), error, error.__traceback__)
        printed[call, debug] = capsys.readouterr().err
    line = lost.__code__.co_firstlineno + 1
    first, second, *_ = printed.pop((lost, "OFF")).splitlines()
    assert first == "rankmesh.RankFailedError: rank 1 (host, pid 7) failed"
    assert second.startswith(f"  at test_tracebacks.py:{line} in lost, called at test_tracebacks.py:")
    assert all("Traceback (most recent call last)" in text for text in printed.values())


def test_an_error_that_cannot_be_folded_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKMESH_DEBUG", "none of its values")
    error = error_of(lost)
    print_exception(type(error), error, error.__traceback__)
    assert "Traceback (most recent call last)" in capsys.readouterr().err
