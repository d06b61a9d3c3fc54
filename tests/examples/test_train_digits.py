"""The training: the same result however many ranks share the work, through the launcher and without it."""

from __future__ import annotations

import importlib
import subprocess
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def train_digits(examples: Path) -> ModuleType:
    return importlib.import_module("train_digits")


class ThreadGradients:
    """A GradientBucketer for ranks that are threads."""

    def __init__(self, parameters: Mapping[str, np.ndarray], everyones: list[Any], barrier: threading.Barrier) -> None:
        self.grads = {name: np.empty_like(parameter) for name, parameter in parameters.items()}
        self._everyones = everyones
        self._barrier = barrier
        everyones.append(self.grads)

    def ready(self, name: str) -> None:
        pass

    def wait(self) -> None:
        self._barrier.wait()
        means = {name: np.mean([grads[name] for grads in self._everyones], axis=0) for name in self.grads}
        self._barrier.wait()
        self.grads.update(means)


def train_as_threads(train_digits: ModuleType, size: int, options: Namespace) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the parameters and losses of each rank."""
    training, _ = train_digits.load()
    everyones: list[Any] = []
    barrier = threading.Barrier(size, timeout=30)
    networks = [train_digits.Network(train_digits.WIDTHS, train_digits.SEED) for _ in range(size)]
    gradients = [ThreadGradients(network.parameters, everyones, barrier) for network in networks]
    losses = [np.empty(0)] * size

    def work(rank: int) -> None:
        plan = list(train_digits.batches(len(training.labels), options, rank=rank, size=size))
        losses[rank] = train_digits.train(networks[rank], training, plan, gradients[rank], rate=options.lr)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(train_digits.flat(network), curve) for network, curve in zip(networks, losses, strict=True)]


@pytest.mark.parametrize(("size", "batch"), [(2, 61), (5, 5), (8, 61)])
def test_any_number_of_ranks_trains_as_one_does_on_their_samples(
    train_digits: ModuleType, size: int, batch: int
) -> None:
    options = Namespace(epochs=1, batch=batch, lr=0.01)
    training, _ = train_digits.load()
    alone = train_digits.Network(train_digits.WIDTHS, train_digits.SEED)
    plan = train_digits.whole_batches(len(training.labels), options, size)
    gradients = train_digits.LocalGradients(alone.parameters)
    wanted_losses = train_digits.train(alone, training, plan, gradients, rate=options.lr)

    found = train_as_threads(train_digits, size, options)
    for parameters, _ in found:
        np.testing.assert_allclose(parameters, train_digits.flat(alone), atol=1e-12)
    np.testing.assert_allclose(np.mean([losses for _, losses in found], axis=0), wanted_losses, atol=1e-12)


def test_an_epoch_covers_every_sample_in_an_order_of_its_own(train_digits: ModuleType) -> None:
    options = Namespace(epochs=2, batch=6)
    plan = train_digits.whole_batches(10, options, size=3)
    assert [len(batch) for batch in plan] == [6, 6, 6, 6]
    epochs = [np.concatenate(plan[:2]), np.concatenate(plan[2:])]
    for epoch in epochs:
        assert sorted(np.bincount(epoch)) == [1] * 8 + [2] * 2, "two of ten come once more, as three ranks share 12"
    assert epochs[0].tolist() != epochs[1].tolist()


def test_every_rank_has_equally_many_samples_in_every_step(train_digits: ModuleType) -> None:
    options = Namespace(epochs=1, batch=8)
    plans = [list(train_digits.batches(21, options, rank=rank, size=3)) for rank in range(3)]
    assert [[len(part) for part in plan] for plan in plans] == [[2, 2, 2, 1]] * 3


def test_digits_are_split_without_overlap(train_digits: ModuleType) -> None:
    training, test = train_digits.load()
    assert (len(training.labels), len(test.labels)) == (1438, 359)
    assert training.images.shape == (1438, 64)
    assert 0 <= training.images.min() < training.images.max() == 1
    everything = np.concatenate([training.images, test.images])
    assert len(np.unique(everything, axis=0)) == 1797  # no image twice, so none in both sets


KILLED = """
import hashlib, os, signal, sys
sys.path.insert(0, {examples!r})
import train_digits
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
steps, step = [], train_digits.Momentum.step
def counted(self, gradients):
    steps.append(None)
    if {killed}.get(attempt) == rank and len(steps) == 100:
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, gradients)
compare = train_digits.identical_on_all_ranks
def show(array):
    print("parameters", hashlib.sha256(array).hexdigest(), flush=True)
    return compare(array)
train_digits.Momentum.step, train_digits.identical_on_all_ranks = counted, show
sys.exit(train_digits.main())
"""


@pytest.mark.processes
def test_launched_training_keeps_its_promises_whichever_ranks_are_killed(
    python: Run, examples: Path, tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    launched = ("-m", "rankmesh.run", "--nproc-per-node=2", "--max-restarts=2")
    options = ("--epochs=12", "--checkpoint=out/digits.npz", "--out=out/loss.png")
    ended = []
    for killed in ({0: 0, 1: 1}, {}):  # by attempt: rank 0 hosts the store, rank 1 does not
        script.write_text(KILLED.format(examples=str(examples), killed=killed))
        done = python(*launched, script, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        for attempt, rank in killed.items():
            assert f"[rankmesh] restart {attempt + 1} of 2: all 2 ranks start again" in done.stderr
            assert f"rank {rank} failed first: signal SIGKILL (9)" in done.stderr
            # 23 steps an epoch; 100 steps were four epochs and a part.
            assert f"goes on after {(attempt + 1) * 92} of 276 steps" in done.stdout
        assert "all ranks identical" in done.stdout
        assert "single process: equal, max difference" in done.stdout
        assert accuracy(done.stdout) >= 95
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["loss.png"], "the checkpoint is removed"
        assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
        ended.append((accuracy(done.stdout), *parameters(done.stdout)))
    assert len(ended[0]) == 2
    assert ended[0] == ended[1]
    assert "100%" in done.stderr  # the progress bar, of rank 0 only
    assert done.stderr.count("training:") == 1


ELASTIC = """
import hashlib, os, signal, sys
sys.path.insert(0, {examples!r})
import train_digits
place, steps, step = os.environ["RANK"] + os.environ.get("RANKMESH_JOIN", ""), [], train_digits.ElasticTraining._step
def counted(self, gradients):
    steps.append(None)
    if {killed}.get(place) == len(steps) and not os.path.exists(place):
        open(place, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, gradients)
compare = train_digits.identical_on_all_ranks
def show(array):
    print("parameters", hashlib.sha256(array).hexdigest(), flush=True)
    return compare(array)
train_digits.ElasticTraining._step, train_digits.identical_on_all_ranks = counted, show
sys.exit(train_digits.main())
"""


@pytest.mark.processes
def test_the_elastic_training_loses_and_regains_ranks(python: Run, examples: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    launched = ("-m", "rankmesh.run", "--nproc-per-node=3", "--max-restarts=4", "--replace", script)
    options = ("--elastic", "--epochs=12", "--out=out/loss.png", "--patience=100")
    found = []
    # By rank, and 1 for the process in its place: the steps after which it is killed. Rank 0 has the store.
    for killed in ({"2": 30, "0": 90, "21": 55}, {}):  # each once
        script.write_text(ELASTIC.format(examples=str(examples), killed=killed))
        done = python(*launched, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        for number, rank in enumerate([2, 0, 2] if killed else [], 1):
            assert f"rank {rank} failed: signal SIGKILL (9); replacement {number} of 4: pid " in done.stderr
        assert done.stdout.count(" 2 ranks: lost rank ") == len(killed), done.stdout
        assert done.stdout.count(" 3 ranks: go on") == len(killed), done.stdout
        assert "all ranks identical" in done.stdout
        assert "single process: equal" in done.stdout
        assert accuracy(done.stdout) >= 95
        assert done.stdout.count("parameters ") == 3
        assert len(parameters(done.stdout)) == 1
        found.append(accuracy(done.stdout))
    assert found[0] == found[1]


@pytest.mark.processes
def test_the_elastic_training_goes_on_with_fewer_ranks_if_nobody_comes(
    python: Run, examples: Path, tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(ELASTIC.format(examples=str(examples), killed={"1": 30}))
    launched = ("-m", "rankmesh.run", "--nproc-per-node=3", "--failure-grace=100", script)
    done = python(*launched, "--elastic", "--epochs=8", "--out=out/loss.png", "--patience=0.5")
    assert done.returncode == 128 + 9, done.stdout + done.stderr
    assert "2 ranks: nobody has joined: rank 0 waited 0.5 s for ranks 2" in done.stdout
    assert "single process: equal" in done.stdout
    assert done.stdout.count("parameters ") == 2
    assert len(parameters(done.stdout)) == 1


@pytest.mark.processes
def test_it_goes_on_with_another_number_of_ranks(python: Run, examples: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(examples=str(examples), killed={0: 1}))
    options = ("--epochs=12", "--checkpoint=out/digits.npz", "--out=out/loss.png")
    killed = python("-m", "rankmesh.run", "--nproc-per-node=2", script, *options)
    assert killed.returncode == 128 + 9, killed.stdout + killed.stderr
    script.write_text(KILLED.format(examples=str(examples), killed={}))
    done = python("-m", "rankmesh.run", "--nproc-per-node=5", script, *options)
    assert "goes on after 92 of 284 steps" in done.stdout, "an epoch has 23 steps with two ranks, 24 with five"
    assert "single process: equal" in done.stdout, done.stdout + done.stderr
    assert accuracy(done.stdout) >= 95
    assert len(parameters(done.stdout)) == 1


@pytest.mark.processes
def test_runs_without_a_launcher_and_fails_when_it_learnt_too_little(python: Run, examples: Path) -> None:
    done = python(examples / "train_digits.py", "--epochs=1", "--lr=1e-6", "--hold=0.1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "on 1 rank(s)" in done.stdout
    assert "all ranks identical" in done.stdout
    assert accuracy(done.stdout) < 95
    assert "holding for 0.1 s: curl http://127.0.0.1:" in done.stdout


def accuracy(output: str) -> float:
    """Return the per cent that the script printed."""
    return float(output.partition("test accuracy: ")[2].partition("%")[0])


def parameters(output: str) -> set[str]:
    """Return the digests of the parameters that the ranks ended with."""
    return {line.partition("parameters ")[2] for line in output.splitlines() if "parameters " in line}
