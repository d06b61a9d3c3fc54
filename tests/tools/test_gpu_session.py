"""The session for machines with a GPU: its steps over the double of CuPy, its limits, and what it keeps of a step."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_session.py"


@pytest.fixture(scope="module")
def session() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_session", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logs(out: Path) -> dict[str, str]:
    with tarfile.open(out / "logs.tar.gz") as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        return {Path(file.name).name: archive.extractfile(file).read().decode() for file in files}  # type: ignore[union-attr]


def rows(out: Path) -> dict[str, str]:
    """Return the outcome of each step in the summary."""
    lines = [line.split("|") for line in (out / "summary.md").read_text().splitlines() if line.startswith("|")]
    return {line[1].strip(): line[2].strip() for line in lines[2:]}


@pytest.mark.processes
def test_steps_run_over_the_double(tmp_path: Path) -> None:
    chosen = ["environment", "results-nccl-2", "killed-nccl"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "run", "--double", "--out", str(tmp_path), "--steps", *chosen],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + str(logs(tmp_path))
    assert rows(tmp_path) == dict.fromkeys(chosen, "0")
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("# Over the double of CuPy (asked for): figures mean nothing\n")
    for found in (
        "environment: a double of a GPU; GPU: available; NCCL: 23203 of /double/libnccl.so.2",
        "all_reduce over NCCL, 2 ranks, equal NumPy's",
        "rank 1 killed in mid-call: named at rank 2 after",
        "a new job on the GPU ended with exit code 0",
    ):
        assert found in summary
    assert set(logs(tmp_path)) == {f"{name}.log" for name in chosen}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs.tar.gz", "summary.md"]


def test_what_fails_or_takes_too_long_leaves_its_output_and_time_for_the_rest(
    session: ModuleType, tmp_path: Path
) -> None:
    def step(name: str, code: str, seconds: float) -> tuple[object, ...]:
        return session.Step(name, [sys.executable, "-u", "-c", code], seconds)

    script = tmp_path / "endless.py"
    script.write_text("""
import subprocess
print("result: begun")
try:
    subprocess.run(["sleep", "600"])
except KeyboardInterrupt:
    print("interrupted")
""")
    steps = [
        step("fails", "print('[rank 0] result: 1 MiB'); raise SystemExit(3)", 0.5),
        session.Step("hangs", [sys.executable, "-u", str(script)], 0.5),
        session.Step("missing", ["no-such-program"], 0.5),
        session.Step("shared", [], 0.5, sharing=True),
        step("later", "print('done')", 5.0),
    ]
    out, folder = tmp_path / "out", tmp_path / "logs"
    out.mkdir()
    folder.mkdir()
    began = time.monotonic()
    assert not session.Session(out, folder, lambda _: os.environ, 22_000, "A title", 10.0).run(steps, double=False)
    assert time.monotonic() - began < 30
    outcomes = rows(out)
    assert outcomes.pop("hangs").startswith("stopped after ")
    assert outcomes.pop("shared").startswith("left out: ranks that share a GPU need NCCL 23000")
    assert outcomes == {"fails": "3", "missing": "127", "later": "0"}
    assert {name: text.splitlines()[1] for name, text in logs(out).items()} == {
        "fails.log": "[rank 0] result: 1 MiB",
        "hangs.log": "result: begun",
        "missing.log": "[Errno 2] No such file or directory: 'no-such-program'",
        "later.log": "done",
    }
    assert logs(out)["hangs.log"].endswith("interrupted\n")
    assert "* fails: 1 MiB\n* hangs: begun\n" in (out / "summary.md").read_text()


def test_the_steps_fit_the_session_and_leave_the_gpus_settings_alone(session: ModuleType, tmp_path: Path) -> None:
    every = session.steps(False, tmp_path)
    assert sum(step.seconds for step in every) <= session.TOTAL_SECONDS <= 480
    for step in every:
        command = " ".join(step.command)
        assert not any(word in command for word in ("nvidia-smi", "reset", "mig")), command


def test_the_wheels_are_those_that_are_locked_and_not_present(session: ModuleType) -> None:
    entries = list(session.missing(session.PRESENT))
    names = {entry.partition("==")[0] for entry in entries}
    assert {"fastapi", "pydantic", "pydantic-core", "starlette", "uvicorn", "nccl4py", "cuda-pathfinder"} <= names
    assert not names & set(session.PRESENT)
    assert all("--hash=sha256:" in entry for entry in entries)
