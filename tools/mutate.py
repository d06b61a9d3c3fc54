"""The share of small faults in the product that its tests notice, by room: ``python -m tools.mutate``.

A mutant differs in one place: a comparison is inverted or moves its boundary, a condition is inverted or loses a
clause, a constant changes, a function returns nothing, a statement goes. The seed draws mutants of lines that tests
run. Each is written into a copy of the tree in out/mutate, where the tests of its line run, those of its room first,
the fastest first, until one fails. It is *killed* if one fails, *hung* if they do not end in time, else *survived*, or
*suspect* of being equivalent: its line logs, or has figures of seconds, bytes or items.

The lines of each test are recorded at first, and by ``--cover``: without paths all anew, as after changes of the
product; with paths these in addition, as of changed tests before ``--again``; with ``--processes`` also those that
start ranks. Record on an idle machine: a test's time decides whether it is among those that run.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from coverage import CoverageData

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "mutate"
TREE, DATA, SECONDS, CHOSEN, RESULTS = (OUT / name for name in ("tree", "coverage", "seconds", "chosen", "results"))
CORE = "agent/rankmesh_agent/native/core.abi3.so"
TESTS = ("tests/agent", "tests/gateway", "tests/sdk", "tests/security")
BUDGET = 60.0  # recorded seconds of the tests of one mutant
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_INVERTED = ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.GtE), (ast.LtE, ast.Gt))
_TYPES = ("annotation", "returns", "decorator_list")
_BOUNDARY = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE))
_SUSPECT = re.compile(r"\blog(ger)?\.|\bwarn|_SECONDS|_BYTES|\bMAX_|_seconds\b|monotonic\(|clock\(|timeout|deadline")
_COVERAGE = f"""[run]
source_pkgs = rankmesh, rankmesh_agent, rankmesh_gateway
core = ctrace
parallel = true
patch = subprocess, fork, _exit
sigterm = true
disable_warnings = module-not-imported
data_file = {DATA}
plugins = tools.mutate_plugin
"""
_changes = itertools.count(1)


class Mutant(NamedTuple):
    """A change of a file: ``old`` at ``start`` becomes ``new``; a function's statement begins in the line ``first``."""

    file: str
    first: int
    line: int
    start: int
    old: str
    new: str
    kind: str

    @property
    def room(self) -> str:
        """The folder of its room's tests, without ``tests/``."""
        package, _, *folders, _ = Path(self.file).parts
        return "/".join([package, *(folder.lstrip("_") for folder in folders[:1])])

    def diff(self) -> str:
        """Return what changes, and the line where."""
        where = (TREE / self.file).read_text().split("\n")[self.line - 1].strip()
        return f"    {where}\n  - {self.old}\n  + {self.new}"


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield what becomes of a node: the kind of change, the node that goes, and the one in its place."""
    match node:
        case ast.Compare(left, operators, right):
            for (i, operator), pairs in itertools.product(enumerate(operators), (_INVERTED, _BOUNDARY)):
                for other in [pair[type(operator) is pair[0]] for pair in pairs if type(operator) in pair]:
                    kind = "boundary" if pairs is _BOUNDARY else "comparison"
                    yield kind, node, ast.Compare(left, [*operators[:i], other(), *operators[i + 1 :]], right)
        case ast.BoolOp(operator, values):
            yield "boolean", node, ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            for i in range(len(values)):
                rest = [*values[:i], *values[i + 1 :]]
                yield "boolean", node, ast.BoolOp(operator, rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(ast.Not(), operand):
            yield "boolean", node, operand
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            yield "boolean", test, ast.UnaryOp(ast.Not(), test)
        case ast.Constant(bool(value)):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield "constant", node, ast.Constant(value + 1)
        case ast.Return(ast.expr() as result) if ast.unparse(result) != "None":
            yield "return", node, ast.Return(ast.Constant(None))
        case ast.Assign([ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield "statement", node, ast.Pass()
        case ast.Expr(ast.Call() | ast.Await()) | ast.Break() | ast.Continue():
            yield "statement", node, ast.Pass()


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    lines = [line + "\n" for line in text.split("\n")]
    begins = list(itertools.accumulate(map(len, lines), initial=0))

    def place(line: int, column: int) -> int:
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def walk(node: ast.AST, first: int) -> Iterator[Mutant]:
        for kind, old, new in variants(node):
            assert isinstance(old, ast.expr | ast.stmt)
            start, end = place(old.lineno, old.col_offset), place(old.end_lineno or 0, old.end_col_offset or 0)
            written = ast.unparse(new) if isinstance(new, ast.stmt | ast.Constant) else f"({ast.unparse(new)})"
            yield Mutant(file, first, old.lineno, start, text[start:end], written, kind)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in _TYPES and not isinstance(child, ast.JoinedStr):
                    inside = first or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    yield from walk(child, child.lineno if inside and isinstance(child, ast.stmt) else first)

    yield from walk(ast.parse(text), 0)


def drawn(seed: str, rooms: str) -> list[Mutant]:
    """Return the mutants of all files in the order of the seed, which a change of other files does not alter."""
    found: list[tuple[str, Mutant]] = []
    for path in sorted(path for package in ("agent", "gateway", "sdk") for path in (TREE / package).rglob("*.py")):
        text = path.read_text()
        for mutant in mutants(str(path.relative_to(TREE)), text):
            if re.fullmatch(rooms, mutant.room):
                key = [seed, mutant.file, mutant.kind, text.split("\n")[mutant.line - 1], mutant.old, mutant.new]
                found.append((hashlib.sha256("\0".join(key).encode()).hexdigest(), mutant))
    return [mutant for _, mutant in sorted(found)]


@functools.lru_cache(maxsize=16)
def tests_by_line(file: str) -> dict[int, list[str]]:
    """Return the recorded tests of each line of a file."""
    data = CoverageData(str(DATA))
    data.read()
    lines: dict[int, list[str]] = data.contexts_by_lineno(str(TREE / file))
    return lines


def tests_of(mutant: Mutant) -> set[str]:
    """Return the tests that run a mutant's statement, or any line of its file if the import runs it."""
    lines = tests_by_line(mutant.file)
    run: Iterable[int] = range(mutant.first, mutant.line + 1) if mutant.first else lines
    return {test for line in run for test in lines.get(line, ())}


def cover(paths: Sequence[str], marks: str) -> None:
    """Record which tests run which lines, and for how long."""
    rcfile = OUT / "coveragerc"
    rcfile.write_text(_COVERAGE)
    if not paths:
        DATA.unlink(missing_ok=True)
        SECONDS.unlink(missing_ok=True)
    coverage, variables = [sys.executable, "-m", "coverage"], environment("0", MUTATE_SECONDS=str(SECONDS))
    options = ["-p", "tools.mutate_plugin", "-q", "--tb=line", "-m", marks, "-n2", "--dist=loadfile", *(paths or TESTS)]
    subprocess.run([*coverage, "run", f"--rcfile={rcfile}", "-m", "pytest", *options], cwd=TREE, env=variables)
    combine = ["combine", "--append", "--quiet", f"--rcfile={rcfile}"]
    subprocess.run([*coverage, *combine], cwd=TREE, env=variables, check=True)


def prepare() -> None:
    """Copy the tree, and become the reaper of what tests leave behind."""
    shutil.rmtree(TREE, ignore_errors=True)
    shutil.copytree(ROOT, TREE, ignore=shutil.ignore_patterns(".git", ".venv*", "out", ".*_cache", ".hypothesis"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the tests, too
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def environment(native: str, **more: str) -> dict[str, str]:
    """Return the variables of tests in the copy of the tree."""
    path = os.pathsep.join(str(TREE / name) for name in ("agent", "gateway", "sdk", "tests", "."))
    return {**os.environ, "PYTHONPATH": path, "RANKMESH_NATIVE": native, **more}


@contextlib.contextmanager
def planted(file: str, text: str) -> Iterator[bool]:
    """Write a text into the copy of a file, and put back what was there; yield whether the text compiles."""
    path, core, compiled = TREE / file, TREE / CORE, not file.endswith(".py")
    before, stat, built = path.read_text(), path.stat(), core.read_bytes() if compiled else b""
    try:
        path.write_text(text)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + next(_changes) * 10**9))  # what bytecode goes by
        if compiled:
            subprocess.run([sys.executable, "hatch_build.py"], cwd=TREE, env=environment("1"), capture_output=True)
        yield not compiled or core.exists()
    finally:
        path.write_text(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        _end_leftovers()
        if compiled:
            core.write_bytes(built)


def _end_leftovers() -> None:
    for _ in range(20):
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), 0)


def run(arguments: Sequence[str], limit: float, native: str = "0", **more: str) -> tuple[str, str]:
    """Run tests in the copy of the tree until one fails; return the outcome, and which."""
    options = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "tools.mutate_plugin"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *arguments],
            cwd=TREE, env=environment(native, **more), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "hung", f"after {limit:.0f} s"
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines() or [""]
    if code == 0:
        return "survived", lines[-1]
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if code in (4, 5) and not failed:  # wrong arguments, or no tests
        return "stale", lines[-1]
    return "killed", failed[0] if failed else lines[-1]


def judge(mutant: Mutant, tests: set[str], seconds: dict[str, float]) -> tuple[str, str]:
    """Run the tests of a mutant's line, those of its room first."""
    first = sorted(tests, key=lambda test: (not test.startswith(f"tests/{mutant.room}/"), seconds[test]))
    sums = itertools.accumulate(map(seconds.__getitem__, first))
    chosen = [test for test, total in zip(first, sums, strict=True) if total <= BUDGET] or first[:1]
    files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))  # whose fixtures are made once
    CHOSEN.write_text("\n".join(sorted(chosen, key=lambda test: files.index(test.partition("::")[0]))))
    limit = 60 + 2 * sum(map(seconds.__getitem__, chosen))
    text = (TREE / mutant.file).read_text()
    with planted(mutant.file, text[: mutant.start] + mutant.new + text[mutant.start + len(mutant.old) :]):
        state, by = run(files, limit, MUTATE_TESTS=str(CHOSEN))
    return ("suspect" if state == "survived" and _SUSPECT.search(mutant.diff()) else state), by


def table(rows: Iterable[dict[str, str]]) -> str:
    """Return the outcomes by room; the shares are noticed, killed or hung, of all, and of those not suspect."""
    rooms: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row, room in itertools.product(rows, ("all", "")):
        rooms[room or row["room"]][row["state"]] += 1
    states = ("killed", "hung", "survived", "suspect")
    lines = [f"{'room':24}" + "".join(f"{title:>10}" for title in (*states, "noticed", "certain"))]
    for room, counted in sorted(rooms.items()):
        noticed, total = counted["killed"] + counted["hung"], sum(counted[state] for state in states)
        shares = [noticed / max(1, each) for each in (total, total - counted["suspect"])]
        lines.append(f"{room:24}" + "".join(f"{counted[s]:10}" for s in states) + "".join(f"{s:10.0%}" for s in shares))
    return "\n".join(lines)


def main() -> int:
    """Judge mutants, print each, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=100, metavar="N", help="mutants to judge")
    parser.add_argument("--seed", default="1", help="draws the mutants")
    parser.add_argument("--rooms", default=".*", metavar="REGEX", help="rooms, as 'agent/(store|group)'")
    parser.add_argument("--cover", nargs="*", metavar="PATH", help="record which lines these tests run, or all anew")
    parser.add_argument("--processes", action="store_true", help="record tests that start ranks as processes, too")
    parser.add_argument("--again", action="store_true", help="only those of the last run that were not killed")
    given = parser.parse_args()
    prepare()
    if given.cover is not None or not DATA.exists():
        cover(given.cover or (), "" if given.processes else "not processes")
    rows: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if given.again else {}
    again = {name for name, row in rows.items() if row["state"] != "killed"}
    seconds, untested = json.loads(SECONDS.read_text()), 0
    for mutant in drawn(given.seed, given.rooms):
        name = f"{mutant.file}:{mutant.line}\n{mutant.diff()}"
        if name not in again if given.again else len(rows) >= given.sites:
            continue
        tests = tests_of(mutant) & seconds.keys()
        untested += not tests
        if tests:
            state, by = judge(mutant, tests, seconds)
            rows[name] = {"room": mutant.room, "state": state, "by": by}
            where = f"{state:9}{mutant.file}:{mutant.line}, {mutant.kind}; {len(tests)} tests: {by}"
            print(where, "" if state == "killed" else f"\n{mutant.diff()}", flush=True)
            RESULTS.write_text(json.dumps(rows, indent=1))
    print(table(rows.values()), f"\nseed {given.seed}; no test runs the lines of {untested} others")
    return 0


if __name__ == "__main__":
    sys.exit(main())
