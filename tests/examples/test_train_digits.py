"""The training: the same result however many ranks share the work, through the launcher and without it."""

from __future__ import annotations

import importlib
import subprocess
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def train_digits(examples: Path) -> ModuleType:
    return importlib.import_module("train_digits")


class Adder:
    """all_reduce for ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._parts: list[np.ndarray] = [np.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def of(self, rank: int) -> Callable[[np.ndarray], None]:
        def add_up(array: np.ndarray) -> None:
            self._parts[rank] = array.copy()
            self._barrier.wait()
            array[:] = sum(self._parts)
            self._barrier.wait()

        return add_up


def train_as_threads(train_digits: ModuleType, size: int, options: Namespace) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the parameters and losses of each rank."""
    training, _ = train_digits.load()
    adder = Adder(size)
    networks = [train_digits.Network(train_digits.WIDTHS, train_digits.SEED) for _ in range(size)]
    losses = [np.empty(0)] * size

    def work(rank: int) -> None:
        losses[rank] = train_digits.train(
            networks[rank], training, options, rank=rank, size=size, add_up=adder.of(rank)
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(network.parameters, curve) for network, curve in zip(networks, losses, strict=True)]


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("batch", [5, 61])
def test_any_number_of_ranks_trains_as_one_does(train_digits: ModuleType, size: int, batch: int) -> None:
    options = Namespace(epochs=1, batch=batch, lr=0.01)
    [(wanted, wanted_losses)] = train_as_threads(train_digits, 1, options)
    for parameters, losses in train_as_threads(train_digits, size, options):
        np.testing.assert_allclose(parameters, wanted, atol=1e-12)
        np.testing.assert_allclose(losses, wanted_losses, atol=1e-12)


def test_batches_cover_every_sample_once_an_epoch(train_digits: ModuleType) -> None:
    plan = list(train_digits.batches(samples=10, batch=4, epochs=2))
    assert [len(batch) for batch in plan] == [4, 4, 2, 4, 4, 2]
    for epoch in (plan[:3], plan[3:]):
        assert sorted(np.concatenate(epoch)) == list(range(10))


def test_digits_are_split_without_overlap(train_digits: ModuleType) -> None:
    training, test = train_digits.load()
    assert (len(training.labels), len(test.labels)) == (1438, 359)
    assert training.images.shape == (1438, 64)
    assert 0 <= training.images.min() < training.images.max() == 1
    everything = np.concatenate([training.images, test.images])
    assert len(np.unique(everything, axis=0)) == 1797  # no image twice, so none in both sets


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "batch"), [(1, 64), (3, 50), (4, 64)])
def test_launched_training_keeps_its_promises(
    python: Run, examples: Path, tmp_path: Path, ranks: int, batch: int
) -> None:
    done = python(
        *("-m", "rankmesh.launch", f"--nproc-per-node={ranks}"),
        *(examples / "train_digits.py", f"--batch={batch}", "--out=curves/loss.png"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all ranks identical" in done.stdout
    assert "single process: equal, max difference" in done.stdout
    assert accuracy(done.stdout) >= 95
    assert (tmp_path / "curves" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "100%" in done.stderr  # the progress bar, of rank 0 only
    assert done.stderr.count("training:") == 1


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
