"""The rank of benchmarks.ddp: its figures, and that it measures nothing that is wrong."""

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
def ddp_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The module, in a world of one rank."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    torch.distributed.init_process_group("rankmesh", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield importlib.import_module("benchmarks.ddp_rank")
    torch.distributed.destroy_process_group()


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_step_is_timed_whole_and_in_parts(ddp_rank: ModuleType) -> None:
    trainer = ddp_rank.Trainer(ddp_rank.net(), 4)
    found = ddp_rank.figures(trainer, 2, 3)
    assert [len(each) for each in found] == [4, 4, 4]
    assert all(min(seconds) > 0 and overlap == 0 for *seconds, overlap in found), "there is one bucket"


def test_what_averages_wrongly_is_not_timed(ddp_rank: ModuleType) -> None:
    trainer = ddp_rank.Trainer(ddp_rank.net(), 4)

    def twice(state, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotations that are text
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    trainer._model.register_comm_hook(None, twice)
    with pytest.raises(ArithmeticError, match=r"rank 0: a gradient is .* off the mean of all ranks'"):
        ddp_rank.figures(trainer, 1, 1)


def test_overlap_is_what_is_over_when_the_last_bucket_begins(ddp_rank: ModuleType) -> None:
    flights = ddp_rank.Flights()
    flights._began, flights._ended = [1.0, 2.0, 4.0], {0: 2.0, 1: 5.0, 2: 6.0}
    assert flights.overlap() == (1 + 2 + 0) / (1 + 3 + 2)


def test_the_models_are_as_large_as_the_page_says(ddp_rank: ModuleType) -> None:
    assert parameters(ddp_rank.mlp()) == pytest.approx(10e6, rel=0.01)
    assert parameters(ddp_rank.net()) == 21_840
