"""The examples for torch, started in each of three ways; the losses of such training are gloo's in test_training.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import Ranks, free_port, wait_until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "torch"
EPOCHS = 2
MORE = {"fsdp_digits.py": ["checkpoint in out/fsdp_digits: read again, equal"]}


@pytest.mark.processes
def test_started_in_any_way_two_ranks_train_alike(ranks: Ranks) -> None:
    commands = {
        "ddp_digits.py": ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"],
        "fsdp_digits.py": ["-m", "rankmesh.run", "--nproc-per-node=2"],
        "average_gradients.py": [],
    }
    options = [f"--epochs={EPOCHS}", "--spawn=2"]  # the latter is for who is not a rank yet
    started = {
        program: ranks.command(*launcher, str(EXAMPLES / program), *options, name=program, PYTHONUNBUFFERED="")
        for program, launcher in commands.items()
    }
    ranks.wait(list(started.values()), seconds=180.0)
    assert [process.code for process in started.values()] == [0, 0, 0], ranks.transcript()
    wait_until(lambda: not ranks.left(), "multiprocessing's resource tracker, which ends after the program")

    printed = {
        program: [line for line in process.stdout.splitlines() if not line.startswith("[rankmesh]")]
        for program, process in started.items()
    }
    lines = printed["ddp_digits.py"]
    for program, found in printed.items():
        assert [line.removeprefix("[rank 0] ") for line in found] == lines + MORE.get(program, []), program
    *losses, identical, accuracy = lines
    assert all(re.fullmatch(r"epoch \d: loss \d\.\d{8}", loss) for loss in losses)
    assert len(losses) == EPOCHS
    assert re.fullmatch(r"all ranks identical: [0-9a-f]{16}", identical), "the parameters' bits"
    assert re.fullmatch(r"test accuracy: \d+\.\d\d%", accuracy)
