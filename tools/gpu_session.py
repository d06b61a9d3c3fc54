"""Everything that is to be seen on a machine with a GPU, in one command of at most eight minutes.

    python tools/gpu_session.py wheels     # elsewhere, with a network: what the machine lacks, into out/wheels
    python tools/gpu_session.py run        # there: all steps; $OUT, or out/gpu-session, gets summary.md and logs.tar.gz

The project runs from its source tree. Without a GPU, or with ``--double``, the steps run over
the double of CuPy that the tests use: that tries this script, and its figures mean nothing. The GPU's settings (clocks,
power, MIG) are left as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WHEELS, SITE = ROOT / "out" / "wheels", ROOT / "out" / "gpu-site"
LOCKED = ROOT / "docker" / "locked"
BINDINGS = ("nccl4py", "cuda-pathfinder")
"""Packages that bind NCCL; its library is the machine's, that of torch for instance: NVIDIA's package has 300 MB."""
PRESENT = ("colorama", "ml-dtypes", "numpy")
"""Packages that are not carried, by the names in LOCKED: the machine's own fit its CuPy and torch, or it needs none."""
TAGS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)] + ["manylinux2014_x86_64"]
TOTAL_SECONDS = 480.0
SHARING_VERSION = 23_000
"""First version of NCCL that takes ranks which share a GPU."""
_STOP_SECONDS = 5.0
_RESULT = re.compile(r"^(?:\[rank \d+\] )?result: (.*)$", re.MULTILINE)
"""Lines of a step's log that the summary repeats."""
_PYTHON = sys.executable
_RUN = [_PYTHON, "-m", "rankmesh.run", "--nproc-per-node"]
_CHECKS, _FIGURES = ["-m", "tools.gpu_checks"], ["-m", "tools.gpu_figures"]
_PYTEST = ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider")
_NAMES = "tests/test_cuda_double.py::test_its_names_and_parameters_are_those_of_cupy_and_nccl4py"
Environment = Callable[[bool], Mapping[str, str]]


class Step(NamedTuple):
    """A step of the session.

    Attributes:
        name: of the step and its log.
        command: program and arguments.
        seconds: its share of the session; it may use what earlier steps have left, too.
        variables: of its own.
        sharing: whether it needs an NCCL that takes ranks which share a GPU.
        module: the module that it needs, '' for none.
        tests: whether it is the tests, which load the double themselves.
    """

    name: str
    command: Sequence[str]
    seconds: float
    variables: Mapping[str, str] = {}
    sharing: bool = False
    module: str = ""
    tests: bool = False

    def left_out(self, nccl: int) -> str:
        """Return why the step cannot run with a version of NCCL, 0 for none; '' if it can."""
        if self.sharing and nccl < SHARING_VERSION:
            return f"ranks that share a GPU need NCCL {SHARING_VERSION} or later; nccl4py has {nccl or 'none'}"
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        return ""


def steps(double: bool, logs: Path) -> list[Step]:
    """Return the steps, in their order; some write more than their output into the folder of logs."""
    small = ["--small"] if double else []
    effort = ["--rounds", "1", "--ranks", "2", "--sizes", "4", "65536"]
    if not double:
        effort = ["--rounds", "3", "--sizes", "4", "65536", "16777216", "268435456"]
    tests = ["tests/gpu/test_multigpu.py", "tests/gpu/test_selection.py"]
    if not double:
        tests = ["tests/gpu", _NAMES, "--numprocesses", "8", "--dist", "loadfile"]

    def job(ranks: int, module: str, name: str, seconds: float, engine: str = "nccl") -> Step:
        variables = {"GPU_ENGINE": engine, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        command = [*_RUN, str(ranks), "-m", f"tools.{module}", name, *small]
        label = f"{name.replace('_', '-')}-{engine}-{ranks}"
        return Step(label, command, seconds, variables, sharing=engine == "nccl" and ranks > 1)

    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    killed = [_PYTHON, *_FIGURES, "killed", *small]
    return [
        Step("environment", [_PYTHON, *_CHECKS, "environment"], 20),
        Step("doctor", [*_RUN, "2", *_CHECKS, "doctor"], 25),
        job(1, "gpu_checks", "results", 20),
        job(2, "gpu_checks", "results", 35),
        job(4, "gpu_checks", "results", 40),
        job(2, "gpu_checks", "results", 20, "host"),
        job(4, "gpu_checks", "results", 20, "host"),
        Step("torch-tensors", [*_RUN, "2", *_CHECKS, "torch_tensors", *small], 25, shared, module="torch"),
        Step("torch-ddp", [*_RUN, "2", *_CHECKS, "ddp", *small], 30, shared, module="torch"),
        job(2, "gpu_checks", "late", 20),
        Step("killed-nccl", killed, 30, shared, sharing=True),
        Step("killed-host", killed, 20, {"GPU_ENGINE": "host"}),
        job(1, "gpu_figures", "overhead", 15),
        job(2, "gpu_figures", "figures", 30),
        job(2, "gpu_figures", "figures", 25, "host"),
        Step("test-gpu", [_PYTHON, *_PYTEST, *tests], 75, tests=True),
        Step(
            "benchmarks",
            [_PYTHON, "-m", "benchmarks", *effort, "--only", "gpu", "--json", str(logs / "benchmarks.json")],
            30,
        ),
    ]


# Steps as processes


class Session:
    """Runs steps, and writes the summary and the logs after each of them.

    Args:
        out: folder for ``summary.md``, ``logs.tar.gz``, and the log of the step that runs: few files,
            as a machine that is lent may give back no more.
        logs: folder for the logs until they are packed.
        environment: returns the variables of a step, given whether it gets the double of CuPy.
        nccl: version of NCCL, 0 for none.
        title: first line of the summary.
        total: seconds for all steps.
    """

    def __init__(self, out: Path, logs: Path, environment: Environment, nccl: int, title: str, total: float) -> None:
        self._out, self._logs, self._environment, self._nccl = out, logs, environment, nccl
        self._title, self._total = title, total
        self._rows: list[tuple[str, str, str]] = []
        self._results: list[str] = []

    def run(self, chosen: Sequence[Step], double: bool) -> bool:
        """Run steps one after the other; return whether all that ran ended with exit code 0."""
        until, passed = time.monotonic() + self._total, True
        for number, step in enumerate(chosen):
            later = sum(other.seconds for other in chosen[number + 1 :] if not other.left_out(self._nccl))
            reason = step.left_out(self._nccl)
            began = time.monotonic()
            outcome = f"left out: {reason}" if reason else self._run(step, until - began - later, double)
            passed = passed and (bool(reason) or outcome == "0")
            self._rows.append((step.name, outcome, f"{time.monotonic() - began:.1f}"))
            self._write()
            print(f"{step.name}: {outcome}", flush=True)
        return passed

    def _run(self, step: Step, seconds: float, double: bool) -> str:
        """Run a step; return its exit code in words."""
        print(f"{step.name}: at most {seconds:.0f} s", flush=True)
        log = self._out / f"{step.name}.log"
        with log.open("wb") as file:
            file.write(f"$ {' '.join(step.command)}\n".encode())
            file.flush()
            variables = {**self._environment(double and not step.tests), **step.variables}
            code = _call(step.command, variables, file.fileno(), seconds)
        text = log.read_text(errors="replace")
        self._results += [f"{step.name}: {found}" for found in _RESULT.findall(text)]
        shutil.move(log, self._logs / log.name)
        return f"stopped after {seconds:.0f} s" if code is None else str(code)

    def _write(self) -> None:
        lines = [f"# {self._title}", "", "| step | exit code | seconds |", "|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in self._rows]
        lines += ["", *(f"* {line}" for line in self._results), ""]
        (self._out / "summary.md").write_text("\n".join(lines))
        packed = self._out / "logs.tar.part"
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(self._logs, "logs")
        packed.rename(self._out / "logs.tar.gz")


def _call(command: Sequence[str], environment: Mapping[str, str], output: int, seconds: float) -> int | None:
    """Run a command in a process group of its own; return its exit code, None if it was stopped at the limit."""
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
    except OSError as error:
        os.write(output, f"{error}\n".encode())
        return 127
    code: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(max(seconds, 0.1))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):  # pytest reports upon the first
            if process.poll() is None or number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_SECONDS)
    return code


# Environment


def environment(first: Sequence[Path], double: bool) -> dict[str, str]:
    """Return the variables of all steps, with which Python finds the source tree and the double of CuPy."""
    path = [*map(str, first), *(str(ROOT / folder) for folder in ("agent", "gateway", "sdk", "."))]
    if double:
        path = [str(ROOT / "tests" / "support" / "cuda_double"), *path, str(ROOT / "tests")]
    inherited = os.environ.get("PYTHONPATH", "")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RANKMESH_", "MASTER_"))}
    variables |= {"PYTHONPATH": os.pathsep.join([*path, *filter(None, [inherited])]), "PYTHONUNBUFFERED": "1"}
    return variables | ({"CUDA_DOUBLE_GPUS": "gpu-0"} if double else {})


def why_no_gpu() -> str:
    """Return why CuPy finds no GPU, '' if it finds one."""
    code = "import cupy; assert cupy.cuda.runtime.getDeviceCount(), 'CUDA finds no GPU'"
    done = subprocess.run([_PYTHON, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return "" if done.returncode == 0 else next(reversed(done.stderr.split("\n")[:-1]), "Python failed")


def nccl_version(variables: Mapping[str, str]) -> int:
    """Return the version of the NCCL that nccl4py finds, 0 for none."""
    code = "from rankmesh_agent.device import runtime; print(runtime.nccl().get_version())"
    done = subprocess.run([_PYTHON, "-c", code], env=variables, capture_output=True, text=True, timeout=60, check=False)
    return int(done.stdout or 0)


def install(wheels: Path) -> list[Path]:
    """Unpack the wheels if this Python lacks some; return the folders to search for modules before all others."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files or all(map(importlib.util.find_spec, ("fastapi", "nccl"))):
        return []
    shutil.rmtree(SITE, ignore_errors=True)
    pip = [_PYTHON, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    done = subprocess.run([*pip, "--target", str(SITE), *files], check=False)
    if done.returncode:
        print(f"pip cannot install {wheels}: exit code {done.returncode}", file=sys.stderr)
    return [SITE]


# Wheels


def missing(present: Sequence[str]) -> Iterator[str]:
    """Yield the locked requirements, with their hashes, of the packages that are not present."""
    for file, wanted in (("core.txt", None), ("gpu-cuda13.txt", BINDINGS)):
        for entry in re.sub(r"\\\n\s*", "", (LOCKED / file).read_text()).splitlines():
            name = re.match(r"[\w.-]+", entry)
            if name is not None and name.group() not in present and (wanted is None or name.group() in wanted):
                yield entry


def download(folder: Path, present: Sequence[str]) -> None:
    """Download the wheels of what the project needs at run time and the machine lacks, as locked for the image."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wanted = folder / "requirements.txt"
    wanted.write_text("\n".join(missing(present)) + "\n")
    pip = [_PYTHON, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    target = ["--python-version", "3.12", "--implementation", "cp", *(f"--platform={tag}" for tag in TAGS)]
    subprocess.run([*pip, *target, "--dest", str(folder), "--requirement", str(wanted)], check=True)
    files = sorted(folder.glob("*.whl"))
    print("\n".join(file.name for file in files))
    print(f"{len(files)} wheels, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB, in {folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["wheels", "run"])
    parser.add_argument("--wheels", type=Path, default=WHEELS, metavar="FOLDER", help="default: out/wheels")
    parser.add_argument("--present", nargs="*", default=PRESENT, metavar="NAME", help="packages the machine has")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "out" / "gpu-session"))
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="these alone, by their names in the summary")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all steps")
    parser.add_argument("--double", action="store_true", help="run over the tests' double of CuPy")
    options = parser.parse_args(arguments)
    if options.command == "wheels":
        download(options.wheels, options.present)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the step's processes end, too
    os.environ["PATH"] += f"{os.pathsep}/usr/local/cuda/bin"  # where CUDA's tools are, if on no path
    out = options.out.resolve()
    reason = "asked for" if options.double else why_no_gpu()
    title = f"Over the double of CuPy ({reason}): figures mean nothing" if reason else "On a GPU"
    with tempfile.TemporaryDirectory() as logs:
        every = steps(bool(reason), Path(logs))
        unknown = set(options.steps or ()) - {step.name for step in every}
        if unknown:
            parser.error(f"no steps {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in every)}")
        out.mkdir(parents=True, exist_ok=True)
        variables = functools.partial(environment, install(options.wheels))
        print(title, flush=True)
        session = Session(out, Path(logs), variables, nccl_version(variables(bool(reason))), title, options.seconds)
        passed = session.run([step for step in every if step.name in (options.steps or [step.name])], bool(reason))
    print((out / "summary.md").read_text())
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
