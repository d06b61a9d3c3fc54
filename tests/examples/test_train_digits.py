"""The training: the same result however many ranks share the work, through the launcher and without it."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

from tools.faults.recovery import RANK, read_marks

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def train_digits(examples: Path) -> ModuleType:
    return importlib.import_module("train_digits")


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


class Ended(NamedTuple):
    """How a training ended: its output, and a digest of the parameters of each rank."""

    code: int
    stdout: str
    stderr: str
    parameters: list[str]

    @property
    def accuracy(self) -> float:
        """Per cent of the test set."""
        return float(self.stdout.partition("test accuracy: ")[2].partition("%")[0])


@pytest.fixture
def train(python: Run, digits: Path, tmp_path: Path) -> Callable[..., Ended]:
    """Run the program; see recovery_rank.py for ``kills``."""

    def run(launcher: str, options: str, kills: str = "") -> Ended:
        marks = Path(tempfile.mkdtemp(prefix="marks-", dir=tmp_path))
        arguments = [*launcher.split(), RANK, marks, kills, 0, "train_digits", *options.split()]
        done = python("-m", "rankmesh.run", *arguments, PYTHONPATH=str(digits))
        parameters = [mark.value for mark in read_marks(marks) if mark.what == "parameters"]
        return Ended(done.returncode, done.stdout, done.stderr, parameters)

    return run


@pytest.mark.processes
def test_launched_training_keeps_its_promises_whichever_ranks_are_killed(
    train: Callable[..., Ended], tmp_path: Path
) -> None:
    done = train(
        "--nproc-per-node=2 --max-restarts=2",
        "--epochs=12 --checkpoint=out/digits.npz --out=out/loss.png",
        "0.0:100,1.1:100",  # rank 0 hosts the store, rank 1 does not
    )
    assert done.code == 0, done
    for rank in (0, 1):
        assert f"[rankmesh] restart {rank + 1} of 2: all 2 ranks start again" in done.stderr
        assert f"rank {rank} failed first: signal SIGKILL (9)" in done.stderr
        # 23 steps an epoch; 100 steps were four epochs and a part.
        assert f"goes on after {(rank + 1) * 92} of 276 steps" in done.stdout
    assert "all ranks identical" in done.stdout
    assert "single process: equal, max difference" in done.stdout
    assert done.accuracy >= 95
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["loss.png"], "the checkpoint is removed"
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(set(done.parameters)) == 1
    assert "100%" in done.stderr  # the progress bar, of rank 0 only
    assert "training:" in done.stderr


@pytest.mark.processes
def test_the_elastic_training_loses_and_regains_ranks(train: Callable[..., Ended]) -> None:
    done = train(
        "--nproc-per-node=3 --max-restarts=4 --replace",
        "--elastic --epochs=12 --out=out/loss.png --patience=100",
        "2.0:30,0.0:90,2.0+:55",  # rank 0 has the store
    )
    assert done.code == 0, done
    killed = [2, 0, 2]
    for number, rank in enumerate(killed, 1):
        assert f"rank {rank} failed: signal SIGKILL (9); replacement {number} of 4: pid " in done.stderr
    assert done.stdout.count(" 2 ranks: lost rank ") == len(killed), done.stdout
    assert done.stdout.count(" 3 ranks: go on") == len(killed), done.stdout
    assert "all ranks identical" in done.stdout
    assert "single process: equal" in done.stdout
    assert done.accuracy >= 95
    assert len(done.parameters) == 3
    assert len(set(done.parameters)) == 1


@pytest.mark.processes
def test_the_elastic_training_goes_on_with_fewer_ranks_if_nobody_comes(train: Callable[..., Ended]) -> None:
    done = train(
        "--nproc-per-node=3 --failure-grace=100",
        "--elastic --epochs=8 --out=out/loss.png --patience=0.5",
        "1.0:30",
    )
    assert done.code == 128 + 9, done
    # Of a busy machine's ranks, a survivor may be late, too, or the gateway.
    late = r"2 ranks: nobody has joined: rank 0 (waited 0\.5 s for ranks? [12]\b|could not reach the gateway)"
    assert re.search(late, done.stdout), done.stdout
    assert "single process: equal" in done.stdout
    assert len(done.parameters) == 2
    assert len(set(done.parameters)) == 1


@pytest.mark.processes
def test_it_goes_on_with_another_number_of_ranks(train: Callable[..., Ended]) -> None:
    options = "--epochs=12 --checkpoint=out/digits.npz --out=out/loss.png"
    assert train("--nproc-per-node=2", options, "1.0:100").code == 128 + 9
    done = train("--nproc-per-node=3", options)
    assert "goes on after 92 of " in done.stdout
    assert "single process: equal" in done.stdout, done
    assert done.accuracy >= 95
    assert len(set(done.parameters)) == 1


@pytest.mark.processes
def test_runs_without_a_launcher_and_fails_when_it_learnt_too_little(python: Run, examples: Path) -> None:
    done = python(examples / "train_digits.py", "--epochs=1", "--lr=1e-6", "--hold=0.1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "on 1 rank(s)" in done.stdout
    assert "all ranks identical" in done.stdout
    assert float(done.stdout.partition("test accuracy: ")[2].partition("%")[0]) < 95
    assert "holding for 0.1 s: curl http://127.0.0.1:" in done.stdout
