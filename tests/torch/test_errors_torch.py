"""Errors that are RankMesh's and torch's at once."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as c10d

import rankmesh
from rankmesh.torch._errors import to_torch_error


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (rankmesh.DistError, c10d.DistError),
        (rankmesh.RankFailedError, c10d.DistBackendError),
        (rankmesh.CollectiveTimeoutError, c10d.DistBackendError),
        (rankmesh.errors.JoinTimeoutError, c10d.DistNetworkError),
        (rankmesh.errors.StoreTimeoutError, c10d.DistStoreError),
        (rankmesh.QueueEmptyError, c10d.QueueEmptyError),
    ],
)
def test_an_error_is_of_both_classes_and_keeps_what_it_says(
    ours: type[rankmesh.DistError], torchs: type[Exception]
) -> None:
    error = ours("rank 3 is not there", ranks=[3], op="barrier", group="world", seq=7)
    error.first_failure = "an earlier one"
    both = to_torch_error(error)
    assert isinstance(both, ours)
    assert isinstance(both, torchs)
    assert type(both).__name__ == ours.__name__
    assert both.message.startswith(error.message)
    assert both.details() == error.details()
    assert both.first_failure == "an earlier one"
    assert to_torch_error(both) is both
    again = pickle.loads(pickle.dumps(both))
    assert (type(again), str(again), again.details()) == (type(both), str(both), both.details())


def test_a_timeout_has_the_word_that_torchs_users_search_for() -> None:
    assert " timeout " in str(to_torch_error(rankmesh.CollectiveTimeoutError("waited 1.0 s for rank 1")))
