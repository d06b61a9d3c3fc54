"""The public face: what is exported is there, documented, and nothing else."""

from __future__ import annotations

import inspect
import types

import pytest

import rankmesh
from rankmesh_agent.wire.errors import BY_CODE


def test_all_names_what_is_public() -> None:
    public = {
        name
        for name, value in ((name, getattr(rankmesh, name)) for name in dir(rankmesh))
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert public | {"__version__"} == set(rankmesh.__all__)


def test_no_name_is_exported_twice() -> None:
    assert len(rankmesh.__all__) == len(set(rankmesh.__all__))


@pytest.mark.parametrize("name", [name for name in rankmesh.__all__ if callable(getattr(rankmesh, name))])
def test_everything_public_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(rankmesh, name))


def test_every_error_is_exported() -> None:
    assert {kind.__name__ for kind in BY_CODE.values()} <= set(rankmesh.__all__)


def test_what_is_not_there_is_told_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'rankmesh' has no attribute 'al_reduce'"):
        rankmesh.al_reduce  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'al_reduce' from 'rankmesh'"):
        from rankmesh import al_reduce  # noqa: F401


def test_names_are_looked_up_once() -> None:
    """After the first one all are the module's own: a call costs no more than with any module."""
    assert rankmesh.all_reduce is vars(rankmesh)["all_reduce"] is vars(rankmesh._face)["all_reduce"]
