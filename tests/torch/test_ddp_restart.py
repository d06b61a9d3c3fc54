"""examples/torch/ddp_digits.py goes on from its checkpoint after a restart, and ends as if no rank had died."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Ranks

pytestmark = pytest.mark.processes

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "torch"
EPOCHS = 3
OPTIONS = (f"--epochs={EPOCHS}", "--checkpoint=out/ddp")
RANKMESH_RUN = ("-m", "rankmesh.run", "--nproc-per-node=2", "--max-restarts=1")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Gives each attempt a store of its own: gloo of torch 2.13 finds the addresses of dead ranks in a common one."""

KILLED_ONCE = """
import os, runpy, signal, sys
sys.path.insert(0, {folder!r})
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim.optimizer import register_optimizer_step_post_hook
left = {count} if os.environ["RANK"] == "{rank}" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0
def count_down(*ignored):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
def then_count(method):
    def wrapper(*arguments, **named):
        result = method(*arguments, **named)
        if hasattr(result, "wait"):
            result.wait()
        count_down()
        return result
    return wrapper
if {moment!r} == "step":
    register_optimizer_step_post_hook(count_down)
else:
    setattr(FileSystemWriter, {moment!r}, then_count(getattr(FileSystemWriter, {moment!r})))
runpy.run_path({folder!r} + "/ddp_digits.py", run_name="__main__")
"""


def printed(ranks: Ranks, *command: str, **variables: str) -> list[str]:
    """Run a command; return what rank 0 prints."""
    started = ranks.command(*command, *OPTIONS, name="job", **variables)
    ranks.wait([started], seconds=180.0)
    assert started.code == 0, ranks.transcript()
    assert list((ranks.folder / "out" / "ddp").iterdir()) == [], "the checkpoints are deleted in the end"
    return [line.removeprefix("[rank 0] ") for line in started.stdout.splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What a job prints in which no rank dies."""
    ranks = Ranks(tmp_path_factory.mktemp("undisturbed"))
    try:
        yield printed(ranks, *TORCHRUN, str(FOLDER / "ddp_digits.py"), "--backend=gloo")
    finally:
        ranks.end()


@pytest.mark.parametrize(
    ("launcher", "backend", "rank", "moment", "count", "epochs"),
    [
        pytest.param(RANKMESH_RUN, "rankmesh", 1, "step", 60, 2, id="rankmesh run, in a step"),
        pytest.param(RANKMESH_RUN, "rankmesh", 1, "write_data", 3, 2, id="rankmesh run, when its part is written"),
        pytest.param(TORCHRUN, "rankmesh", 0, "finish", 2, 1, id="torchrun, when all parts are written"),
        pytest.param(TORCHRUN, "gloo", 1, "step", 60, 2, id="torchrun and gloo, in a step"),
    ],
)
def test_a_killed_rank_changes_nothing(
    ranks: Ranks,
    undisturbed: list[str],
    launcher: tuple[str, ...],
    backend: str,
    rank: int,
    moment: str,
    count: int,
    epochs: int,
) -> None:
    script = ranks.folder / "killed_once.py"
    script.write_text(KILLED_ONCE.format(folder=str(FOLDER), rank=rank, moment=moment, count=count))
    lines = printed(ranks, *launcher, str(script), f"--backend={backend}", **(NEW_STORE if backend == "gloo" else {}))
    restart = lines.index(f"goes on after epoch {epochs}")
    assert lines[:epochs] == undisturbed[:epochs]
    assert lines[restart + 1 :] == undisturbed[epochs:], "losses, the parameters' digest, the accuracy"
    assert len(undisturbed) == EPOCHS + 2
