"""``rankmesh bench``: a job of its own; test_cli_page has its table, over shared memory."""

from __future__ import annotations

import pytest
from support.command import here

pytestmark = pytest.mark.processes

EVERY = "all_reduce,reduce,broadcast,all_gather,gather,scatter,reduce_scatter,all_to_all,barrier"


def test_every_operation():
    done = here("bench", "--ops", EVERY, "--sizes", "4,1K", "--budget", "0.01", "--transport", "tcp", "--json")
    assert (done.code, done.stderr) == (0, "")
    found = done.document
    assert (found["ranks"], found["transport"]) == (2, "tcp")
    cases = [(result["op"], result["bytes"]) for result in found["results"]]
    sized = [(op, nbytes) for op in EVERY.split(",")[:-1] for nbytes in (4, 1024)]
    assert cases == [*sized, ("barrier", 0)]
    for result in found["results"]:
        assert 0 < result["least"] <= result["seconds"]
        assert result["bandwidth"] == pytest.approx(result["bytes"] / result["seconds"])
        assert result["medium"] == "tcp"
    reduced = found["results"][1]
    assert reduced["bus_bandwidth"] == pytest.approx(reduced["bandwidth"])  # 2 (n - 1) / n, and n is 2


@pytest.mark.parametrize(
    "arguments", [["--ops", "all_scatter"], ["--sizes", "4X"], ["--sizes", "-1"], ["--nproc", "0"]]
)
def test_what_makes_no_sense(arguments: list[str]):
    code, stdout, stderr = here("bench", *arguments)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)


def test_a_measurement_that_cannot_be_made():
    code, stdout, stderr = here("bench", "--sizes", "4", "--transport", "shm", RANKMESH_SHM_DIR="/no/such")
    assert (code, stdout, stderr.count("\n")) == (5, "", 2)
    assert "the measurement failed" in stderr


def test_the_time_is_over():
    code, stdout, stderr = here("bench", "--budget", "30", "--timeout", "1")
    assert (code, stdout) == (124, "")
    assert "was not done within 1 s" in stderr
