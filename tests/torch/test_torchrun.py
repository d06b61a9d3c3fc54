"""rankmesh's own init_process_group() under torchrun, which holds MASTER_PORT for a store of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import Ranks, free_port

pytestmark = pytest.mark.processes

AVERAGE = Path(__file__).parents[2] / "examples" / "average.py"
AT_THE_SECOND_ATTEMPT = """\
import os, sys
import rankmesh as dist
dist.init_process_group()
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit("this attempt fails")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, {dist.get_node_local_rank()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def torchrun(ranks: Ranks, *arguments: str, **variables: str) -> list[str]:
    """Run a job of two; return what its ranks print."""
    started = ranks.command("-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments, name="run", **variables)
    ranks.wait([started])
    assert started.code == 0, ranks.transcript()
    return sorted(re.findall(r"rank \d of \d(?:, \d)?", started.stdout))


def test_plain_init_process_group_in_a_slurm_job(ranks: Ranks) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    static = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    assert torchrun(ranks, *static, str(AVERAGE), **slurm) == ["rank 0 of 2", "rank 1 of 2"], ranks.transcript()


def test_the_second_attempt_does_not_meet_the_first(ranks: Ranks) -> None:
    script = ranks.folder / "script.py"
    script.write_text(AT_THE_SECOND_ATTEMPT)
    reported = torchrun(ranks, "--standalone", "--max-restarts", "1", str(script))
    assert reported == ["rank 0 of 2, 0", "rank 1 of 2, 1"], ranks.transcript()
