"""Numbers as ranges."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire.ranges import numbers_in, ranges, shortened


@pytest.mark.parametrize(
    ("numbers", "texts"), [([], []), ([5], ["5"]), ([7, 2, 0, 1, 3], ["0-3", "7"]), ([2, 4, 6], ["2", "4", "6"])]
)
def test_ranges(numbers, texts):
    assert ranges(numbers) == texts
    assert numbers_in(",".join(texts)) == sorted(numbers)


@pytest.mark.parametrize("text", ["x", "-1", "1,,2-x", "0-9999999999"])
def test_no_ranges(text):
    with pytest.raises(ValueError, match=r"ranks|invalid literal"):
        numbers_in(text)


def test_many_numbers_are_shortened():
    assert shortened([0, 1, 5]) == "0, 1, 5"
    assert shortened([0, *range(3, 20)]) == "0, 3-19"
