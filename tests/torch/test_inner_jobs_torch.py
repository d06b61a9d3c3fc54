"""Ranks that start jobs of torch's of their own: each has the ranks of one parent alone."""

from __future__ import annotations

import re

import pytest
from support import inner_jobs
from support.processes import Ranks

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("how", ["environment", "arguments", "tcp", "torchrun"])
@pytest.mark.parametrize(("backend", "options"), [("rankmesh", []), ("gloo", []), ("gloo", ["--as-gloo"])])
def test_the_jobs_of_two_ranks_do_not_mix(ranks: Ranks, how: str, backend: str, options: list[str]) -> None:
    program = [inner_jobs.__file__, how, backend]
    started = ranks.command("-m", "rankmesh.run", "--nproc-per-node", "2", *options, *program, name="run")
    ranks.wait([started])
    assert started.code == 0, ranks.transcript()
    assert sorted(re.findall(r"outer .*", started.stdout)) == ["outer 0: 0.0"] * 2 + ["outer 1: 2.0"] * 2
