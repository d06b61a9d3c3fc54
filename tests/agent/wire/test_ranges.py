"""Numbers as ranges."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire.ranges import ranges


@pytest.mark.parametrize(
    ("numbers", "texts"), [([], []), ([5], ["5"]), ([7, 2, 0, 1, 3], ["0-3", "7"]), ([2, 4, 6], ["2", "4", "6"])]
)
def test_ranges(numbers, texts):
    assert ranges(numbers) == texts
