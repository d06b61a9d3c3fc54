"""docs/api.md: true, and complete."""

from __future__ import annotations

import importlib.util
import types
import warnings
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def api() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("api_page", DOCS / "api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_make_docs_writes(api: types.ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's and our reduce_op
        assert (DOCS / "api.md").read_text() == api.page()


def test_no_name_of_the_reference_is_missing(api: types.ModuleType) -> None:
    assert not set(api.REFERENCE.split()) & set(api.NOT_HERE)


def test_nothing_is_explained_that_needs_no_explanation(api: types.ModuleType) -> None:
    names = set(api.torch_names())
    assert set(api.NOT_HERE) <= names
    assert set(api.DIFFERS) <= names
    assert all(api.find(name) is api._ABSENT for name in api.NOT_HERE)
