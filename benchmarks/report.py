"""One or several runs as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks import ddp
from benchmarks.charts import bus_bandwidth
from benchmarks.operations import IN_FLIGHT, OPERATIONS
from benchmarks.peers import PEERS
from benchmarks.plan import MIB, OVERLAP, Case, Cell
from benchmarks.reasons import REASONS
from benchmarks.results import Results, Run, latest
from benchmarks.stores import CLIENTS, CROWD
from benchmarks.stores import OPERATIONS as STORE_OPERATIONS
from benchmarks.tables import microseconds, ratio, size, spread, table
from benchmarks.targets import LIMITS, TARGETS, Limit, Target, judge

COMPARED = (
    ("gloo", "rankmesh-shm", "gloo / shm"),
    ("mpi", "rankmesh-shm", "Open MPI / shm"),
    ("rankmesh-shm", "rankmesh-registered", "shm / registered"),
    ("gloo", "rankmesh-tcp", "gloo / TCP"),
    ("rankmesh-shm", "rankmesh-attached", "shm / attached"),
)
IDLE = {
    "rss_mb": "resident memory above Python and NumPy, MB, of the rank that has most",
    "idle_percent": "processor, % of a core, of the rank that takes most",
}


LATENCIES = [name for name in OPERATIONS if name not in OVERLAP]
"""The parts of an overlap say nothing one by one; they have a table of their own."""


def page(runs: Sequence[Run], charts: Iterable[tuple[str, str]]) -> str:
    """Return the whole page.

    Args:
        runs: at least one, in the order they were made. Times are of the last one that has
            them, ratios of all runs, separated by slashes.
        charts: title and path of each.
    """
    results = latest(runs)
    sections = [
        "# Benchmarks\n\nMade by `make bench` (`python -m benchmarks`); do not edit.",
        setting(runs),
        *dict.fromkeys(line for run in runs for line in run.left_out),
        f"## Targets\n\n{_TARGETS}\n\n{targets(runs)}",
        section("Charts", "", "\n\n".join(f"![{title}]({path})" for title, path in charts)),
        f"## How it is measured\n\n{_METHOD}",
        f"## Microseconds an operation\n\n{_READING}",
        *(f"### {title(name)}\n\n{found}" for name in LATENCIES if (found := latencies(runs, name))),
        section("Bus bandwidth, GB/s", _BANDWIDTH, bandwidths(results)),
        section("Overlap", _OVERLAP, overlaps(results)),
        section("Training with DistributedDataParallel", _DDP, training(runs)),
        section("Stores", _STORES, stores(runs)),
        section("Join", _JOIN, joins(runs)),
        section("An idle rank", _IDLE, idle(runs)),
        section("Every ratio of the targets", "", every_ratio(runs)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def section(heading: str, words: str, found: str) -> str:
    """Return a section around a table; empty when the table is."""
    return "\n\n".join(part for part in (f"## {heading}", words, found) if part) if found else ""


def setting(runs: Sequence[Run]) -> str:
    """Return the table of what was measured on what, a column a run."""
    names = dict.fromkeys(name for run in runs for name in run.machine)
    rows = [
        ["began", *(f"{run.began:%Y-%m-%d %H:%M} UTC" for run in runs)],
        ["took", *(f"{run.minutes:.0f} minutes" for run in runs)],
        *([name, *(run.machine.get(name, "") for run in runs)] for name in names),
        ["measured", *(", ".join(dict.fromkeys(run.results.versions.values())) for run in runs)],
    ]
    return table(["", *(f"run {number}" for number in range(1, len(runs) + 1))], rows, texts=1 + len(runs))


def targets(runs: Sequence[Run]) -> str:
    """Return the table of the targets: each row's worst figure in each run, and whether it is met; then why not."""
    rows, missed = [], {}
    for target in (*TARGETS, *LIMITS):
        verdicts = [judge(target, run.results) for run in runs]
        against = target.against if isinstance(target, Target) else ""
        places = [_NONE if one.where is None else short_name(one.where.case) for one in verdicts]
        where = " / ".join(places if len(set(places)) > 1 else places[:1])
        said = [verdict.worst for verdict in verdicts]
        rows.append([outcome(target, runs), target.row, against, target.wanted, where, *said])
        if rows[-1][0].startswith("missed") and target.row in REASONS:
            missed[target.row] = f"* **{target.row}**: missed, because {REASONS[target.row]}"
    headings = ["", "case", "against", "wanted", "worst at", *(f"run {n}" for n in range(1, len(runs) + 1))]
    return "\n\n".join([table(headings, rows, texts=5), *(["\n".join(missed.values())] if missed else [])])


def outcome(target: Target | Limit, runs: Sequence[Run]) -> str:
    """Return met or missed: a target is met when it is in every run that measured it."""
    verdicts = [judge(target, run.results).met for run in runs]
    measured = [run for run, met in zip(runs, verdicts, strict=True) if met is not None]
    if not measured:
        return "not measured"
    met = [verdict for verdict in verdicts if verdict is not None]
    comparisons = target.comparisons if isinstance(target, Target) else ()
    lacking = sum(any(run.results.ratio(*one) is None for run in measured) for one in comparisons)
    unseen = f" ({lacking} of {len(comparisons)} not in all runs)" if lacking else ""
    return f"met{unseen}" if all(met) else f"missed{unseen}"


def latencies(runs: Sequence[Run], operation: str) -> str:
    """Return the table of an operation: medians with their spread, and ratios. Empty when it was not measured."""
    results = latest(runs)
    found = sorted(case for case in results.cases() if case.operation == operation)
    peers = [name for name in PEERS if any(Cell(case, name) in results.turns for case in found)]
    compared = [one for one in COMPARED if one[0] in peers and one[1] in peers]
    rows = []
    for case in found:
        times = [timing(results, Cell(case, peer)) for peer in peers]
        ratios = [ratios_of(runs, Cell(case, theirs), Cell(case, ours)) for theirs, ours, _ in compared]
        counts = [len(turns) for cell, turns in results.turns.items() if cell.case == case]
        rows.append([str(case.ranks), size(case.nbytes) if case.nbytes else "", *times, *ratios, str(max(counts))])
    headings = ["ranks", "array", *(PEERS[peer].short for peer in peers), *(words for *_, words in compared), "rounds"]
    return table(headings, rows) if rows else ""


def bandwidths(results: Results) -> str:
    """Return the table of bus bandwidths from 1 MiB."""
    rows = []
    for case in results.cases():
        if case.nbytes >= MIB and case.operation in OPERATIONS and OPERATIONS[case.operation].bus is not None:
            cells = [Cell(case, peer) for peer in PEERS]
            values = [bus_bandwidth(results, cell) if cell in results.turns else None for cell in cells]
            figures = ["" if value is None else f"{value:.2f}" for value in values]
            rows.append([title(case.operation), str(case.ranks), size(case.nbytes), *figures])
    return table(["", "ranks", "array", *(peer.short for peer in PEERS.values())], rows, texts=1) if rows else ""


def overlaps(results: Results) -> str:
    """Return the table of how much of an asynchronous all_reduce is hidden behind something else."""
    rows = []
    for ranks in dict.fromkeys(case.ranks for case in results.cases()):
        for peer in PEERS.values():
            cells = {
                cell.case.operation.removeprefix("overlap_"): cell
                for cell in results.turns
                if cell.case.operation in OVERLAP and (cell.case.ranks, cell.peer) == (ranks, peer.name)
            }
            if len(cells) == len(OVERLAP):
                times = {name: results.summary(cell).median for name, cell in cells.items()}
                alone = times["all_reduce"]
                hidden = [_hidden(alone, times[other], times[f"while_{other}"]) for other in ("computing", "sleeping")]
                columns = [timing(results, cells[name.removeprefix("overlap_")]) for name in OVERLAP]
                rows.append([peer.short, str(ranks), *columns, *hidden])
    headings = ["", "ranks", "all_reduce", "computing", "sleeping", "while computing", "while sleeping"]
    return table([*headings, "hidden computing", "hidden sleeping"], rows, texts=1) if rows else ""


def _hidden(one: float, other: float, both: float) -> str:
    return f"{100 * max(0.0, min(1.0, (one + other - both) / min(one, other))):.0f} %"


def training(runs: Sequence[Run]) -> str:
    """Return the table of training steps; empty when they were not measured."""
    results = latest(runs)
    rows = []
    for model, words in ddp.MODELS.items():
        for ranks in ddp.RANKS:
            cells = {
                peer.name: {part: Cell(ddp.case(model, part, ranks), peer.name) for part in ddp.PARTS}
                for peer in ddp.PEERS
            }
            for peer in ddp.PEERS:
                ours, theirs = cells[ddp.OURS], cells[peer.name]
                if theirs["step"] not in results.turns:
                    continue
                times = [milliseconds(results, theirs[part]) for part in ddp.PARTS if part != "overlap_percent"]
                share = theirs["overlap_percent"]
                overlap = f"{results.summary(share).median:.0f} %" if share in results.turns else _NONE
                compared = ("step", "communication") if peer.name != ddp.OURS else ()
                ratios = [ratios_of(runs, theirs[part], ours[part]) for part in compared] or ["", ""]
                rows.append([words, str(ranks), peer.short, *times, overlap, *ratios])
    headings = ["", "ranks", "over", "step, ms", "alone", "communication", "its all_reduce", "overlap"]
    headings += ["gloo / RankMesh: step", "communication"]
    return table(headings, rows, texts=1) if rows else ""


def milliseconds(results: Results, cell: Cell) -> str:
    """Return a cell's median in milliseconds, with its spread."""
    summary = results.summary(cell)
    return f"{summary.median / 1e3:.1f} {spread(summary)}"


def stores(runs: Sequence[Run]) -> str:
    """Return the table of store round trips."""
    results = latest(runs)
    rows = []
    for operation in (*STORE_OPERATIONS, *CROWD):
        case = Case(operation, CLIENTS if operation in CROWD else 1, 0)
        ours, theirs = Cell(case, "rankmesh-store"), Cell(case, "torch-store")
        if ours in results.turns:
            words = operation.removeprefix("store_").replace("crowd_", "add, ").replace("multi_get", "multi_get of 100")
            if operation in CROWD:
                words += " client"
            figures = [timing(results, cell) for cell in (ours, theirs)]
            rows.append([words, str(case.ranks), *figures, ratios_of(runs, theirs, ours)])
    return table(["", "clients", "RankMesh", "torch", "torch / RankMesh"], rows, texts=1) if rows else ""


def joins(runs: Sequence[Run]) -> str:
    """Return the table of how long worlds take to come together; empty when that was not measured."""
    rows = []
    for cell in latest(runs).turns:
        if cell.case.operation.startswith("join_"):
            way = cell.case.operation.removeprefix("join_").replace("_", " ")
            each = [1e-6 * one for run in runs for turn in run.results.turns.get(cell, ()) for one in turn]
            extremes = [f"{min(each):.2f}", f"{max(each):.2f}"]
            rows.append([way, str(cell.case.ranks), medians(runs, cell, 1e-6), *extremes])
    return table(["", "ranks", "median, s", "shortest", "longest"], rows, texts=1) if rows else ""


def idle(runs: Sequence[Run]) -> str:
    """Return the table of what a rank costs that does nothing; empty when that was not measured."""
    rows = []
    for operation, words in IDLE.items():
        found = [cell for cell in latest(runs).turns if cell.case.operation == operation]
        rows += [[words, str(cell.case.ranks), medians(runs, cell)] for cell in found]
    return table(["", "ranks", "measured"], rows, texts=1) if rows else ""


def every_ratio(runs: Sequence[Run]) -> str:
    """Return the table of all ratios the targets are made of."""
    rows = []
    for target in TARGETS:
        for comparison in target.comparisons:
            found = ratios_of(runs, *comparison, wanted=target.least)
            if found:
                values = [run.results.ratio(*comparison) for run in runs]
                met = all(value is None or value >= target.least for value in values)
                case = short_name(comparison.ours.case)
                rows.append([case, target.against, target.wanted, found, "met" if met else "missed"])
    return table(["case", "against", "wanted", "measured", ""], rows, texts=3) if rows else ""


def timing(results: Results, cell: Cell) -> str:
    """Return a cell's median and half the middle half of its timings; empty when it was not measured."""
    if cell not in results.turns:
        return ""
    summary = results.summary(cell)
    return f"{microseconds(summary.median)} {spread(summary)}"


def ratios_of(runs: Sequence[Run], theirs: Cell, ours: Cell, wanted: float = 1.0) -> str:
    """Return the ratio in each run, a dash for none, separated by slashes; empty when there is none at all."""
    values = [run.results.ratio(theirs, ours) for run in runs]
    shown = [_NONE if value is None else ratio(value, wanted) for value in values]
    return "" if set(shown) == {_NONE} else " / ".join(shown)


def medians(runs: Sequence[Run], cell: Cell, scale: float = 1.0) -> str:
    """Return a cell's median in each run, a dash for none, separated by slashes."""
    found = [run.results.summary(cell).median * scale if cell in run.results.turns else None for run in runs]
    return " / ".join(_NONE if value is None else f"{value:.2f}" for value in found)


def title(operation: str) -> str:
    """Return an operation's name for people."""
    return {
        "send_recv": "send and recv: latency",
        "bandwidth": "send and recv: many messages",
        "all_gather": "all_gather_into_tensor",
        "reduce_scatter": "reduce_scatter_tensor",
        "all_to_all": "all_to_all_single",
        "all_reduce_float16": "all_reduce, float16",
        "all_reduce_bfloat16": "all_reduce, bfloat16",
        "all_reduce_in_flight": f"{IN_FLIGHT} all_reduce in flight",
    }.get(operation, operation)


def short_name(case: Case) -> str:
    """Return a case in a few words."""
    words = [case.operation.replace("_", " ") if case.operation not in OPERATIONS else title(case.operation)]
    if case.ranks > 1:
        words.append(f"{case.ranks} ranks")
    return ", ".join([*words, *([size(case.nbytes)] if case.nbytes else [])])


_NONE = "-"
_TARGETS = (
    "Ratios say how many times as long the other one takes: above 1x RankMesh is faster. Of each row and run the worst "
    "is shown, and where it was. 'Within 4x' is a ratio of 0.25x or more. A row is met when every cell of it is, in "
    "every run that measured it; all of them are at the end of the page. For send and recv the latency counts."
)
_READING = (
    "Times are medians of all timings, with half the distance between the lower and the upper quartile in per cent. "
    "Ratios say how many times as long the other one takes, and are medians of the rounds' ratios: within a round the "
    "two were measured a moment apart, while over minutes the speed of a virtual machine changes. So they are not the "
    "quotients of the times beside them. With several runs there are as many ratios, in the order of the runs, a dash "
    "for one that did not measure it; times and numbers of rounds are of the last one that did."
)
_METHOD = (
    "What is timed is what a user calls from Python: RankMesh on NumPy arrays, the same functions of torch.distributed "
    "on CPU tensors (gloo), mpi4py's buffer calls (Open MPI). Arrays are float32 and summed unless said otherwise. "
    "Sizes are of the array, and of the larger one where there are two: all_gather's output, reduce_scatter's input. "
    "Registered arrays are made with `dist.empty` in the group's shared memory. "
    "Ranks are processes on one machine, each peer's started by its own launcher (`rankmesh.run`, `torchrun`, "
    "`mpirun --oversubscribe --bind-to none`) with OMP_NUM_THREADS=1. All peers' ranks stay alive together, asleep "
    "while it is not their turn.\n\n"
    "Measured is in rounds; in each, for every size, the peers take turns, another one first in each round. A turn is "
    "a check of the result (every element of it), calls to warm up, one to three timings, and the check again. A "
    "timing is of as many calls, one after the other, as take 10 or 20 ms, at least one, the same number on all ranks, "
    "and counts for the slowest rank. Open MPI uses its shared memory also beside our TCP, and is not compared with "
    "it. More ranks than cores share the cores, as they would in a test on a laptop.\n\n"
    "send and recv: latency is half the time there and back between two ranks (osu_latency); many messages are "
    f"{IN_FLIGHT} begun at once (fewer when they would be more than 64 MiB together), then answered, and the time is "
    "of one (osu_bw). In flight: as many asynchronous all_reduce are begun, then waited for; the time is of all."
)
_BANDWIDTH = (
    "As nccl-tests defines it: bytes of the array per second, times 2 (n - 1) / n for all_reduce, (n - 1) / n for "
    "all_gather, reduce_scatter, all_to_all, gather and scatter, and 1 for broadcast, reduce and messages."
)
_OVERLAP = (
    f"Microseconds of an asynchronous all_reduce of {size(64 * MIB)} begun and waited for, of a matrix product in "
    "NumPy or a sleep of 20 ms (as when a GPU or a disk works), and of the one begun, the other done, then waited for. "
    "Hidden is how much of the shorter of two was saved by doing them together. With a core for each rank there is no "
    "core free for an all_reduce while the rank computes. Figures are of the last run."
)
_DDP = (
    "Milliseconds of a step (forward, backward with all gradients averaged, SGD) of torch's DistributedDataParallel "
    "over torch's backends `rankmesh` and `gloo`, each rank with one thread and its own samples: an MLP (784, 2048, "
    "2048, 2048, 10; 32 samples a rank), the same with gradients that lie in DDP's buckets (gradient_as_bucket_view), "
    "and the network of PyTorch's tutorial (28 by 28 pixels; 64 samples). Alone is the same step under `no_sync()`; "
    "communication is what a step takes longer, torch's copies between gradients and buckets included. Its all_reduce "
    "is of the same buckets, begun together and waited for, and nothing else. Overlap: of the time that buckets are on "
    "their way, the share that is over when the last gradient is there (a single bucket has none). Ratios are gloo's "
    "time to RankMesh's. Before each turn the gradients are compared with the mean of all ranks'. With as many ranks "
    "as cores, or more, communication takes its processor time from the other ranks' steps."
)
_STORES = (
    "Microseconds a call through `dist.TCPStore` and torch's `TCPStore` (libuv), server and clients being processes on "
    f"loopback; values have 64 bytes. Ours acknowledges a set, torch's does not. Below, {CLIENTS} clients add for a "
    "second as fast as they can, each on its own key: what the client that got most waited for each call, the one in "
    "the middle, and the one that got least."
)
_JOIN = (
    "Seconds from before the first process is started until the last rank is ready, with imports: by RankMesh's "
    "launcher, by hand, and with threads of one process as ranks, each with an agent of its own, where there are no "
    "interpreters to start. Medians of each run; the shortest and the longest of all of them."
)
_IDLE = "What a rank costs between calls, its agent's HTTP service and heartbeats included."
