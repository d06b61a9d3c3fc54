"""The recovery rounds find what they look for."""

from __future__ import annotations

import pytest

from tools.faults.recovery import KINDS, Ending, Mark, Outcome, judge, one, table

UNDISTURBED = Ending(0, "all ranks identical\nsingle process: equal\ntest accuracy: 96.94%", [], [])


@pytest.mark.processes
def test_a_round_of_shrinking() -> None:
    outcome = one("shrink", 0, UNDISTURBED)
    assert outcome.wrong + outcome.left == []
    assert outcome.seconds is not None
    assert outcome.error is not None
    assert outcome.joined is not None
    assert 0 < outcome.error < outcome.joined < outcome.seconds
    assert table([outcome])[-1].startswith("| shrink | 1 | 0 | 0 |")


def ending(code: int = 137, output: str = UNDISTURBED.output, steps: int = 3, digests: str = "xxx") -> Ending:
    """How a job ends in which a process dies: the others shrink, make a step, and have these parameters."""
    marks = [Mark(1.0, process, 0, "step", "") for process in "abcd"] + [Mark(2.0, "d", 0, "killed", "")]
    marks += [Mark(2.1, process, 0, "step", "") for process in "abc"[:steps]]  # the victim had its part in it
    marks += [Mark(2.2, process, 0, what, "") for what in ("failed", "joined") for process in "abc"[:steps]]
    marks += [Mark(2.3 + 0.1 * number, process, 0, "step", "") for number, process in enumerate("abc"[:steps])]
    marks += [Mark(3.0, process, 0, "parameters", digest) for process, digest in zip("abc", digests, strict=True)]
    return Ending(code, output, marks, [])


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (ending(), ""),
        (ending(code=1), "exit code: 1, not 137"),
        (ending(output="single process: equal\ntest accuracy: 60.00%"), "accuracy: [60.0], not [96.94]"),
        (ending(output="test accuracy: 96.94%"), "the parameters are not those of one process on its own"),
        (ending(digests="xxy"), "number of different parameters: 2, not 1"),
        (ending(steps=2), "no step was made after the kill"),
    ],
)
def test_what_is_wrong(found: Ending, wrong: str) -> None:
    outcome = Outcome("shrink", 0)
    judge(outcome, KINDS["shrink"], found, UNDISTURBED)
    assert outcome.wrong == ([wrong] if wrong else [])
    if not wrong:
        assert (outcome.error, outcome.joined, outcome.seconds) == pytest.approx((0.2, 0.2, 0.5))


@pytest.mark.parametrize(("ends", "wrong"), [(4, []), (2, ["the job did not end with all ranks"])])
def test_a_lost_host_has_to_join_again(ends: int, wrong: list[str]) -> None:
    marks = [Mark(2.0, "0-2", 0, "killed", "")]
    marks += [Mark(3.0, f"1-{rank}", 1, "joined", "") for rank in range(2)]
    marks += [Mark(3.5, f"1-{rank}", 1, "step", "") for rank in range(2)]
    marks += [Mark(9.0, f"2-{rank}", 2, "parameters", "a") for rank in range(ends)]
    outcome = Outcome("elastic", 0)
    judge(outcome, KINDS["elastic"], Ending(0, UNDISTURBED.output, marks, []), UNDISTURBED)
    assert (outcome.wrong, outcome.seconds) == (wrong, 1.5)
