"""Versions of torch: older ones are refused, and the oldest gets what it lacks."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as c10d
from support.processes import Ranks

import rankmesh.torch
from rankmesh.torch import _patches

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
REFUSAL = "backend 'rankmesh' needs torch 2.7 or newer, but this is torch 2.4.1: pip install 'torch>=2.7'"


def test_the_extra_installs_what_the_backend_needs() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert extras["torch"] == [f"torch>={'.'.join(map(str, rankmesh.torch._OLDEST))}"]


@pytest.mark.parametrize("version", ["2.7.0", "2.7.1+cu126", "2.13.0a0+git1", "3.0"])
def test_newer_ones_are_not_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    rankmesh.torch._refuse_older()


@pytest.mark.processes
def test_an_older_one_is_refused_in_words(ranks: Ranks) -> None:
    """Not by ``import torch`` itself, which imports this package: programs may use torch for something else."""
    begin = "import torch; torch.__version__ = '2.4.1'; "
    autoload = f"{begin}torch.__spec__._initializing = True; import rankmesh.torch; "
    group = "torch.distributed.init_process_group('rankmesh', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)"
    programs = [f"{begin}import rankmesh.torch", f"{autoload}rankmesh.torch.ProcessGroup", f"{autoload}{group}"]
    for number, program in enumerate(programs):
        code = f"try:\n    exec({program!r})\nexcept ImportError as error:\n    print(error)"
        rank = ranks.command("-c", code, name=f"old-{number}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        ranks.succeed([rank])
        assert REFUSAL in rank.stdout, program


@pytest.mark.processes
@pytest.mark.parametrize("autoload", ["1", "0"] if hasattr(c10d.Backend, "_ensure_backend_registered") else ["1"])
def test_the_name_works_without_an_import(ranks: Ranks, autoload: str) -> None:
    """By the entry points of the installed package; torch 2.14 looks the name up if ``import torch`` loads nothing."""
    group = "d.init_process_group('cpu:rankmesh', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)"
    code = f"import torch.distributed as d; {group}; print(d.get_backend_config()); d.destroy_process_group()"
    rank = ranks.command("-c", code, name="lazy", TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    ranks.succeed([rank])
    assert rank.stdout == "cpu:rankmesh\n"


def test_options_that_torch_2_7_leaves_incomplete_are_asynchronous() -> None:
    names = ("AllToAll", "Allreduce", "AllreduceCoalesced", "Barrier", "Gather", "Reduce")
    kinds = {f"{name}Options": type(name, (), {}) for name in names}
    kinds["ReduceOptions"].asyncOp = False  # type: ignore[attr-defined]  # complete
    _patches.complete_options(SimpleNamespace(**kinds))
    assert [kind.asyncOp for kind in kinds.values()] == [True] * 5 + [False]  # type: ignore[attr-defined]
