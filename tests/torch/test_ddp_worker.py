"""The worker of benchmarks.ddp: its steps, and that a wrong average is an error."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed


@pytest.fixture
def ddp_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The module, in a world of one rank."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    torch.distributed.init_process_group("rankmesh", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield importlib.import_module("benchmarks.ddp_worker")
    torch.distributed.destroy_process_group()


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_step_reduces_all_gradients_in_buckets(ddp_worker: ModuleType) -> None:
    trainer = ddp_worker.Trainer(ddp_worker.JOBS["net"]._replace(items=4))
    assert sum(bucket.numel() for bucket in trainer._buckets) == 21_840
    trainer.check()
    trainer.step()
    trainer.step_alone()
    trainer.all_reduce()


def test_what_averages_wrongly_is_not_timed(ddp_worker: ModuleType) -> None:
    trainer = ddp_worker.Trainer(ddp_worker.JOBS["net"]._replace(items=4))

    def twice(state, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotations that are text
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    trainer._model.register_comm_hook(None, twice)
    with pytest.raises(ArithmeticError, match=r"rank 0: a gradient is .* off the mean of all ranks'"):
        trainer.check()


def test_the_models_are_as_large_as_the_page_says(ddp_worker: ModuleType) -> None:
    assert parameters(ddp_worker.mlp()) == pytest.approx(10e6, rel=0.01)
    assert parameters(ddp_worker.net()) == 21_840
    with torch.device("meta"):
        assert parameters(ddp_worker.LanguageModel()) == pytest.approx(124e6, rel=0.01)


def test_a_language_model_takes_texts(ddp_worker: ModuleType) -> None:
    model = ddp_worker.LanguageModel(words=50, length=8, width=24, layers=2)
    likely = model(torch.arange(16).reshape(2, 8))
    assert likely.shape == (16, 50)
    assert torch.allclose(likely.exp().sum(dim=1), torch.ones(16))


def test_every_training_has_a_job(ddp_worker: ModuleType) -> None:
    trainings = importlib.import_module("benchmarks.ddp").TRAININGS
    assert ddp_worker.JOBS.keys() == trainings.keys()
    for name, training in trainings.items():
        assert training.items.startswith(f"{ddp_worker.JOBS[name].items} ")
