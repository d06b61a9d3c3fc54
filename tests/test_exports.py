"""The public face: what is exported is there, documented, and nothing else."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pydoc
import re
import traceback
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


def test_everything_public_is_documented() -> None:
    public = [getattr(rankmesh, name) for name in rankmesh.__all__]
    assert [value for value in public if callable(value) and not inspect.getdoc(value)] == []


def test_all_errors_are_in_a_module_and_nine_in_the_package() -> None:
    for kind in BY_CODE.values():
        assert getattr(rankmesh.errors, kind.__name__) is kind
        assert kind.__module__ == ("rankmesh" if kind.__name__ in rankmesh.__all__ else "rankmesh.errors")
        assert pickle.loads(pickle.dumps(kind)) is kind
    assert [name for name in rankmesh.__all__ if name.endswith("Error")] == [
        *("CollectiveMismatchError", "CollectiveTimeoutError", "DistBackendError", "DistError", "DistNetworkError"),
        *("DistStoreError", "GroupAbortedError", "QueueEmptyError", "RankFailedError"),
    ]


def test_the_other_errors_are_in_the_package_for_one_more_version() -> None:
    with pytest.warns(DeprecationWarning, match=r"rankmesh.JoinTimeoutError is rankmesh.errors.JoinTimeoutError"):
        from rankmesh import JoinTimeoutError
    assert JoinTimeoutError is rankmesh.errors.JoinTimeoutError


def test_classes_and_functions_are_rankmeshs_and_can_be_pickled() -> None:
    public = [getattr(rankmesh, name) for name in rankmesh.__all__]
    for value in [value for value in public if isinstance(value, type | types.FunctionType)]:
        assert value.__module__ == "rankmesh", value
        assert pickle.loads(pickle.dumps(value)) is value
        if isinstance(value, types.FunctionType):
            assert inspect.getsourcefile(value) != rankmesh.__file__, value
            assert inspect.signature(value)


def test_values_of_public_classes_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(rankmesh.ReduceOp.MAX)) is rankmesh.ReduceOp.MAX
    error = pickle.loads(pickle.dumps(rankmesh.RankFailedError("rank 2 died", ranks=[2])))
    assert (type(error), error.ranks, str(error)) == (rankmesh.RankFailedError, (2,), "rank 2 died")
    assert pickle.loads(pickle.dumps(rankmesh.Backend("gloo"))) == "gloo"


def test_a_traceback_names_the_public_class() -> None:
    (line,) = traceback.format_exception_only(rankmesh.RankFailedError("rank 2 died", ranks=[2]))
    assert line == "rankmesh.RankFailedError: rank 2 died\n"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("rankmesh.nn", "GradientBucketer"),
        ("rankmesh.nn.parallel", "DistributedDataParallel"),
        ("rankmesh.utils.data", "DistributedSampler"),
        ("rankmesh.multiprocessing", "spawn"),
    ],
)
def test_names_of_submodules_are_theirs(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name).__module__ == module


def test_help_begins_with_a_first_program_and_the_ways_to_use_it() -> None:
    text = pydoc.plain(pydoc.render_doc(rankmesh))
    begin = text.index("DESCRIPTION")
    order = ["init_process_group()", "all_reduce(gradient)", "rankmesh run --nproc-per-node", "Embedded:", "Attached:",
             "HTTP:", "Start and end:", "Collectives:", "All errors derive from DistError"]  # fmt: skip
    found = [text.index(part, begin) for part in order]
    assert found == sorted(found)
    assert found[-1] < text.index("PACKAGE CONTENTS")


def test_help_mentions_only_names_that_exist() -> None:
    assert rankmesh.__doc__ is not None
    listed = rankmesh.__doc__.partition("* Start and end:")[2].partition("All errors")[0]
    names = set(re.findall(r"\b(?!async_op)\w+_\w+\b|\w+Store\b", listed))
    assert len(names) > 30
    assert names <= set(rankmesh.__all__)


def test_what_is_not_there_is_told_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'rankmesh' has no attribute 'al_reduce'"):
        rankmesh.al_reduce  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'al_reduce' from 'rankmesh'"):
        from rankmesh import al_reduce  # noqa: F401


def test_names_are_looked_up_once() -> None:
    """After the first one all are the module's own: a call costs no more than with any module."""
    assert rankmesh.all_reduce is vars(rankmesh)["all_reduce"] is vars(rankmesh._face)["all_reduce"]
