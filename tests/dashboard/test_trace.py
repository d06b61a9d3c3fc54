"""``rankmesh trace --html``: its page in a browser, from a file, without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from support import overview as made_up
from support.browser import Visit
from support.command import Double, here

LATE = 2
CALLS = 50


def rank_details(rank: int, name: str) -> dict[str, Any]:
    """Return a rank that has made a call of 10 ms each 20 ms; rank LATE came 4 ms later to each than the others."""
    late = 0.004 * (rank == LATE)
    call = {"group": "aa", "op": "all_reduce", "call": f"all_reduce({name})", "error": "", "peer": None, "tag": 0}
    ended = [
        call
        | {"seq": seq, "age": 0.02 * (CALLS - seq), "seconds": 0.01 - late, "nbytes": 4000, "algorithm": "ring_link"}
        for seq in range(1, CALLS + 1)
    ]
    found = made_up.snapshot(rank, calls=[], ended=ended, store_waits=[], monotonic=50.0)
    return found | {"time": 1e9, "uncertainty": 1e-4, "outside": {}}


@pytest.fixture
def page(tmp_path: Path, visit: Callable[..., Visit]) -> Callable[..., Visit]:
    """Writes the page of three ranks, and opens it."""

    def write(name: str = "float32[1000], SUM", **options: Any) -> Visit:
        double = Double()
        try:
            details = [rank_details(rank, name) for rank in range(3)]
            double.answers["/v1/ranks/snapshots?patience=1.0&records=true"] = details
            path = tmp_path / "trace.html"
            done = here("trace", "--html", "-o", str(path), "--gateway", double.url)
        finally:
            double.close()
        assert (done.code, done.stdout) == (0, f"{path}: {3 * CALLS} calls of 3 ranks; a browser opens it\n")
        return visit(path.as_uri(), **options)

    return write


def point(page: Visit, milliseconds: float, row: int, end: float = 990.0) -> None:
    """Move the pointer to a time on a row, when all of the time is shown."""
    chart = page.page.locator("#chart")
    width = chart.bounding_box()["width"] - 150
    chart.hover(position={"x": 150 + milliseconds / end * width, "y": 24 + 20 * row + 10})


def test_ranks_and_their_waits(page: Callable[..., Visit]):
    found = page()
    assert found.rows("#ranks") == [
        ["rank 0 (host-0, pid 4000)", "50", "500.0 ms", "200.0 ms", "0.000 µs"],
        ["rank 1 (host-0, pid 4001)", "50", "500.0 ms", "200.0 ms", "0.000 µs"],
        ["rank 2 (host-0, pid 4002)", "50", "300.0 ms", "0.000 µs", "400.0 ms"],
    ]


def test_the_call_under_the_pointer(page: Callable[..., Visit]):
    found = page()
    point(found, 205.0, 0)
    text = found.text("#call")
    assert text.startswith("rank 0, world: all_reduce(float32[1000], SUM) #11; 10.00 ms from 200.0 ms on; 4000 bytes")
    assert text.endswith("ring_link; waited 4.000 ms for rank 2")
    point(found, 215.0, 0)
    assert found.text("#call") == "Point at a call."
    point(found, 207.0, 2)
    assert "rank 2, world" in found.text("#call")


def test_keys_zoom_and_move(page: Callable[..., Visit]):
    found = page()
    found.page.keyboard.press("+")  # the middle half: 247.5 ms to 742.5 ms
    found.page.keyboard.press("ArrowRight")  # to 346.5 ms
    point(found, 0.9, 0)
    assert "#18; 10.00 ms from 340.0 ms" in found.text("#call") or found.text("#call") == "Point at a call."
    point(found, 35.0, 0)  # 364 ms
    assert "#19; 10.00 ms from 360.0 ms" in found.text("#call")
    found.page.keyboard.press("0")
    point(found, 205.0, 0)
    assert "#11;" in found.text("#call")


def test_it_is_painted(page: Callable[..., Visit]):
    """A call is solid after the last rank has come, paler before, and nothing is between two calls."""
    found = page(viewport={"width": 1400, "height": 600})
    script = """points => {
        const chart = document.getElementById("chart"), left = 150, width = chart.clientWidth - left;
        const { data } = chart.getContext("2d").getImageData(0, 0, chart.width, chart.height);
        return points.map(([at, row]) => {
            const pixel = 4 * (Math.round(left + at / 990 * width) + chart.width * (24 + 20 * row + 16));
            return [...data.slice(pixel, pixel + 4)].join();
        });
    }"""
    waits, runs, between, late = found.page.evaluate(script, [[502.0, 0], [508.0, 0], [515.0, 0], [508.0, 2]])
    assert len({waits, runs, between}) == 3
    assert between == "0,0,0,0"
    assert late == runs


@pytest.mark.parametrize("look", [{"color_scheme": "dark"}, {"viewport": {"width": 400, "height": 640}}], ids=str)
def test_it_follows_the_rules_of_accessible_pages(page: Callable[..., Visit], look: dict[str, Any]):
    found = page(**look)
    report = Axe().run(found.page)
    assert not report.response["violations"], report.generate_report()
    assert found.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_names_are_no_markup(page: Callable[..., Visit]):
    found = page("</script><script>document.title = 'evil'</script>")
    point(found, 205.0, 0)
    assert "</script><script>document.title" in found.text("#call")
    assert found.page.title() == "RankMesh: calls of all ranks"
