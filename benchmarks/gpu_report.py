"""What was measured on GPUs, as a section of Markdown for docs/gpu.md."""

from __future__ import annotations

from statistics import median

from benchmarks.gpu import ALL_REDUCE, BARE, COPY, GREW, IPC, NCCL, PARTS, STAGED
from benchmarks.plan import MIB, Case, Cell
from benchmarks.report import timing
from benchmarks.results import Results, Run
from benchmarks.tables import ratio, size, table

JUDGED = 256 * MIB
SHARE, TIMES = 60, 10
"""At so many bytes: per cent of the bound, at least, and times as fast as through host memory."""


def section(run: Run) -> str:
    """Return the section; nothing where no GPU was measured."""
    results = run.results
    measured = {case.operation for case in results.cases()}
    if GREW[0] not in measured:
        return ""
    parts = [
        f"## Measured on {run.machine['GPU']}, {run.began:%Y-%m-%d}",
        table(["", ""], [[name, what] for name, what in run.machine.items()], texts=2),
        *run.left_out,
        *([f"### NCCL, one rank a GPU\n\n{_NCCL}\n\n{over_nccl(results)}"] if PARTS[0] in measured else []),
        *([f"### Ranks that share a GPU\n\n{_IPC}\n\n{on_one_gpu(results)}"] if ALL_REDUCE in measured else []),
        *([verdicts(results)] if ALL_REDUCE in measured else []),
        f"### Results and memory\n\n{_CHECKS}\n\n{checks(results)}",
    ]
    return "\n\n".join(parts) + "\n"


def over_nccl(results: Results) -> str:
    """Return the table of calls over NCCL."""
    rows = []
    for case in results.cases():
        if case.operation == PARTS[0]:
            figures = []
            for part in PARTS:
                ours, bare = (Cell(case._replace(operation=part), peer) for peer in (NCCL.name, BARE))
                rounds = zip(results.turns[ours], results.turns[bare], strict=True)
                more = median(median(own) - median(theirs) for own, theirs in rounds)
                percent = 100 * (results.ratio(ours, bare) - 1)
                figures += [timing(results, bare), timing(results, ours), f"{more:.1f}", f"{percent:.1f}"]
            rows.append([str(case.ranks), size(case.nbytes), *figures])
    columns = [f"{part}: {what}" for part in ("enqueue", "done") for what in ("bare", "RankMesh", "more", "more, %")]
    return table(["ranks", "array", *columns], rows)


def on_one_gpu(results: Results) -> str:
    """Return the table of ranks that share a GPU."""
    rows = []
    for case in results.cases():
        if case.operation == ALL_REDUCE:
            ipc, staged, copy = (Cell(case, peer.name) for peer in (IPC, STAGED, COPY))
            traffic = 2 * case.ranks * case.nbytes / results.summary(ipc).median / 1e3
            bandwidth = 2 * case.nbytes / results.summary(copy).median / 1e3
            figures = [timing(results, ipc), timing(results, staged), ratio(results.ratio(staged, ipc), TIMES)]
            speeds = [f"{traffic:.2f}", f"{bandwidth:.2f}", f"{_share(results, case):.1f}"]
            rows.append([str(case.ranks), size(case.nbytes), *figures, *speeds])
    headings = ["ranks", "array", "CUDA IPC", "host memory", "host / IPC", "IPC, GB/s", "copy, GB/s", "of the bound, %"]
    return table(headings, rows)


def _share(results: Results, case: Case) -> float | None:
    """Return per cent of the bound: 2 n bytes are moved for each byte of the array, 2 by a copy."""
    copies = results.ratio(Cell(case, COPY.name), Cell(case, IPC.name))
    return None if copies is None else 100 * case.ranks * copies


def verdicts(results: Results) -> str:
    """Return a line for each target: met, missed or not measured."""
    lines = []
    for ranks in dict.fromkeys(case.ranks for case in results.cases() if case.operation == ALL_REDUCE):
        case = Case(ALL_REDUCE, ranks, JUDGED)
        faster = results.ratio(Cell(case, STAGED.name), Cell(case, IPC.name))
        share = ("% of the bound", SHARE, _share(results, case))
        for words, least, found in (share, ("times as fast as through host memory", TIMES, faster)):
            verdict = "not measured" if found is None else f"{found:.4g}, {'met' if found >= least else 'MISSED'}"
            lines.append(f"* {ranks} ranks, {size(JUDGED)}, wanted ≥ {least} {words}: {verdict}")
    return "\n".join(lines)


def checks(results: Results) -> str:
    """Return a line for each team whose results were checked."""
    titles = {peer.name: peer.title for peer in (NCCL, IPC, STAGED)}
    lines = []
    for cell in results.turns:
        if cell.case.operation == GREW[0]:
            device = Cell(cell.case._replace(operation=GREW[1]), cell.peer)
            pool, free = (results.summary(one).median for one in (cell, device))
            what = f"{results.calls[cell]} calls of {size(cell.case.nbytes)}"
            verdict = "met" if pool <= 0 and free <= 0 else "MISSED"
            grown = f"CuPy's pool grew by {pool:.0f} B, what is free on the GPU shrank by {free:.0f} B"
            team = f"{titles[cell.peer]}, ranks: {cell.case.ranks}"
            lines.append(f"* {team}: {what}, all results right; {grown}, wanted 0: {verdict}")
    return "\n".join(lines)


_NCCL = (
    "Microseconds of an in-place all_reduce (float32, SUM): `rankmesh.all_reduce` and CuPy's bare "
    "`NcclCommunicator.allReduce`, in turns in the same processes, on the same stream. Enqueue is by the host's clock, "
    "done between CUDA events around 100 calls (10 above 1 MiB); of the slowest rank. Medians, with half the distance "
    "of the quartiles; 'more' is the median of the rounds' differences. In a group of one rank NCCL moves nothing."
)
_IPC = (
    "Microseconds of an all_reduce (float32, SUM) between CUDA events, on GPU 0, of the slowest rank; host memory is "
    "the same call with backend `gloo`. The bound: n ranks read and write at least 2 n times the array's bytes, at the "
    "speed at which one process copies such an array on the same GPU in the same rounds (bytes read and written). "
    "Arrays that fit into the GPU's cache may beat it. Without NVIDIA's MPS, kernels of several processes take turns."
)
_CHECKS = (
    "Every call's array is filled, reduced (every other time with async_op) and compared, each element, with what "
    "CuPy computes; all of it is enqueued on one stream, with no synchronize from the first call to the last."
)
