"""Training steps with torch's DistributedDataParallel over RankMesh and over gloo, in turns."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median

from benchmarks.peers import TORCHRUN, Peer
from benchmarks.plan import Case, Cell
from benchmarks.results import Results
from benchmarks.run import Say, in_turn
from benchmarks.team import Team

MODELS = {
    "mlp": "MLP, 10 M parameters",
    "mlp_in_buckets": "the same, gradients in the buckets",
    "net": "the tutorial's Net, 22 k",
}
"""What is trained, by the names that benchmarks.ddp_rank has for them."""
STEPS = {"mlp": 1, "mlp_in_buckets": 1, "net": 5}
"""Of how many steps a timing is."""
REPETITIONS = 6
RANKS = (2, 4)
OURS, GLOO = "rankmesh-ddp", "gloo-ddp"
PARTS = ("step", "alone", "communication", "all_reduce", "overlap_percent")

# torchrun looks after its ranks ten times a second, which would disturb the others' turns.
_LAUNCHER = (*TORCHRUN, "--monitor-interval=5")
PEERS = tuple(
    Peer(name, f"DDP over {words}", words, backend, "torch", _LAUNCHER, program="benchmarks.ddp_rank")
    for name, words, backend in ((OURS, "RankMesh", "rankmesh"), (GLOO, "gloo", "gloo"))
)


def case(model: str, part: str, ranks: int) -> Case:
    """Return the case of a part of a model's step: microseconds, but the overlap, which is per cent."""
    return Case(f"ddp_{model}_{part}", ranks, 0)


def measure(peers: list[Peer], rounds: Mapping[int, int], results: Results, say: Say) -> None:
    """Measure steps of all models.

    Args:
        peers: over what.
        rounds: how often each has its turn, by the number of ranks.
        results: what to add the figures to.
        say: takes a line of progress.

    Raises:
        PeerFailedError: a peer did not start, died, averaged wrongly or took too long.
    """
    for ranks, most in rounds.items():
        say(f"{ranks} ranks: starting {', '.join(peer.title for peer in peers)}")
        with ExitStack() as stack:
            teams = [stack.enter_context(Team(peer, ranks)) for peer in peers]
            results.versions.update({team.peer.name: f"{team.peer.title}, {team.version}" for team in teams})
            for number in range(most):
                say(f"{ranks} ranks: DDP, round {number + 1} of {most}")
                for model, steps in STEPS.items():
                    for team in in_turn(teams, number):
                        _turn(team, model, steps, results)


def _turn(team: Team, model: str, steps: int, results: Results) -> None:
    by_rank = team.ask(model, 0, steps, REPETITIONS)
    slowest = [[max(each) for each in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)]
    step, alone, all_reduce = ([1e6 * seconds for seconds in part] for part in list(zip(*slowest, strict=True))[:3])
    overlap = [100 * figures[3] for ranks in by_rank for figures in ranks]
    # A step may be faster than one alone by chance, where there is little to communicate.
    communication = max(1.0, median(step) - median(alone))
    for part, timings in zip(PARTS, (step, alone, [communication], all_reduce, overlap), strict=True):
        if any(timings):  # a single bucket has no overlap
            results.add(Cell(case(model, part, team.ranks), team.peer.name), timings, steps)
