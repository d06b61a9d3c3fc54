"""Numbers, ages and ranks, as the page writes them."""

from __future__ import annotations

import json

import pytest

CASES = {
    "age": [
        ([0], "0.0 s"), ([-1], "0.0 s"), ([9.94], "9.9 s"), ([9.96], "9.9 s"), ([10], "10 s"), ([59.9], "59 s"),
        ([185], "3 min 5 s"), ([7800], "2 h 10 min"), ([97200], "1 d 3 h"), ([None], "0.0 s"),
    ],
    "duration": [([0.00025], "250 µs"), ([0.0015], "1.5 ms"), ([0.25], "250 ms"), ([12.3], "12 s")],
    "bytes": [([0], "0 B"), ([512], "512 B"), ([1536], "1.5 kB"), ([24e6], "24 MB"), ([999.9], "1.0 kB")],
    "count": [([0], "0"), ([7], "7"), ([4.24], "4.2"), ([999.9], "1.0 k"), ([12345], "12.3 k"), ([123456], "123 k")],
    "ranks": [([[]], ""), ([[3, 1, 0, 2, 5]], "0-3, 5"), ([[0, 1]], "0, 1"), ([[7, 7]], "7")],
    "many": [([1, "rank"], "1 rank"), ([0, "rank"], "0 ranks")],
    "tally": [([["a", "b", "a", "new"], ["b", "a", "c"]], "1 b, 2 a, 1 new")],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_words(double, visit, name):
    page = visit(double.url).page
    call = "async ([name, arguments_]) => (await import('/dashboard/format.js'))[name](...arguments_)"
    for arguments, expected in CASES[name]:
        assert page.evaluate(call, [name, arguments]) == expected, json.dumps(arguments)


def test_the_scale_of_a_chart(double, visit):
    page = visit(double.url).page
    call = "async (value) => (await import('/dashboard/chart.js')).roundUp(value)"
    for value, expected in [(0, 1), (3, 5), (1001, 2000), (600, 1000), (1000, 1000), (4e6, 5e6)]:
        assert page.evaluate(call, value) == expected
