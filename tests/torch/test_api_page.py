"""docs/compatibility.md: true, and complete."""

from __future__ import annotations

import importlib.util
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch.torch_version import TorchVersion

import rankmesh

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def api() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("api_page", DOCS / "compatibility.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_make_docs_writes(api: types.ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's and our reduce_op
        assert (DOCS / "compatibility.md").read_text() == api.page()


def test_no_name_of_the_reference_is_missing(api: types.ModuleType) -> None:
    assert not set(api.REFERENCE.split()) & set(api.NOT_HERE)


def test_the_names_that_are_new_are_those_that_torch_has(api: types.ModuleType) -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    for since, names in api.NEW.items():
        there = [name for name in names.split() if api.torch_object(name) is not None]
        assert there == (names.split() if version >= tuple(map(int, since.split("."))) else [])


def test_nothing_is_explained_that_needs_no_explanation(api: types.ModuleType) -> None:
    names = set(api.torch_names())
    assert set(api.NOT_HERE) <= names
    assert set(api.DIFFERS) <= names
    assert all(api.find(name) is api._ABSENT for name in api.NOT_HERE)


def raised(dist: Any, call: str) -> str:
    """Return the name of the exception that a call raises; empty for none."""
    try:
        eval(f"dist.{call}", {"dist": dist, "x": torch.ones(4), "ReduceOp": dist.ReduceOp, "group": dist.group})
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.usefixtures("alone")
def test_exceptions_are_those_of_the_page(api: types.ModuleType) -> None:
    c10d.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    wanted = dict(api.RAISES)
    if TorchVersion(torch.__version__) >= "2.15":
        wanted["split_group(split_ranks=[[5]])"] = (
            "",
            "ValueError",
        )  # torch makes a group of a rank that does not exist
    try:
        assert {call: (raised(c10d, call), raised(rankmesh, call)) for call in wanted} == wanted
    finally:
        c10d.destroy_process_group()
