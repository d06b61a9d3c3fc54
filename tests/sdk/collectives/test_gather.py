"""Collectives with one array per rank, in a world of one; test_sweep.py and test_wrong_calls.py run several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rankmesh as dist

Array = np.ndarray[Any, Any]


class TestAlone:
    """In a world of one rank."""

    pytestmark = pytest.mark.usefixtures("alone")

    LISTS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # noqa: RUF012  # never changed
        "all_gather": ("tensor_list", lambda tensors: dist.all_gather(tensors, np.ones(1))),
        "gather": ("gather_list", lambda tensors: dist.gather(np.ones(1), tensors)),
        "scatter": ("scatter_list", lambda tensors: dist.scatter(np.ones(1), tensors)),
        "reduce_scatter": ("input_list", lambda tensors: dist.reduce_scatter(np.ones(1), tensors)),
        "inputs": ("input_tensor_list", lambda tensors: dist.all_to_all([np.ones(1)], tensors)),
        "outputs": ("output_tensor_list", lambda tensors: dist.all_to_all(tensors, [np.ones(1)])),
    }
    every_list = pytest.mark.parametrize(("name", "call"), LISTS.values(), ids=LISTS)

    @every_list
    def test_a_tuple_will_do(self, name: str, call: Any) -> None:
        assert call((np.ones(1),)) is None

    def test_the_other_names(self) -> None:
        assert dist.all_gather_v is dist.all_gather
        assert dist.reduce_scatter_v is dist.reduce_scatter
        assert dist.gather_into_tensor is dist.gather_single
        assert dist.all_gather_into_tensor is dist.all_gather_single
        assert dist.reduce_scatter_tensor is dist.reduce_scatter_single

    def test_splits_may_be_left_out(self) -> None:
        for splits in (None, [], (), np.array([3])):
            output = np.zeros((3, 2))
            dist.all_to_all_single(output, np.ones((3, 2)), splits, splits)
            assert output.all()
