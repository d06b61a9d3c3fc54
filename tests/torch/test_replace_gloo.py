"""RankMesh under gloo's name: programs that ask torch for gloo, without a change."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.processes import Ranks

NOTE = """[rankmesh] torch's backend "gloo" is RankMesh in this job"""
PROGRAM = """\
import json
import torch
import torch.distributed as dist

dist.init_process_group(BACKEND)
rank, default = dist.get_rank(), dist.group.WORLD
part = dist.new_group([0, 1], backend=PART)
total = torch.ones(3)
dist.all_reduce(total)
found = {
    "is": type(default).__module__,
    "backend": [dist.get_backend(), default._get_backend(torch.device("cpu")).name()],
    "config": dist.get_backend_config().split(",")[0],
    "equal": dist.get_backend() == dist.Backend.GLOO,
    "sum": total.tolist(),
}
if rank < 2:
    dist.all_reduce(total, group=part)
    found["part"] = [dist.get_backend(part), type(part).__module__, total.tolist()]
if found["equal"]:
    dist.monitored_barrier()
layer = torch.nn.Linear(1, 1, bias=False)
model = torch.nn.parallel.DistributedDataParallel(layer)
model(torch.full((1, 1), rank * 1.0)).backward()
found["gradient"] = layer.weight.grad.item()
print(json.dumps(found) + "\\n", end="", flush=True)
dist.destroy_process_group()
"""
MESH = "rankmesh.torch"


def found_by(
    ranks: Ranks, *command: str, backend: str = "gloo", part: str | None = None, **variables: str
) -> list[dict]:
    """Run a program of three ranks; return what each has found."""
    script = ranks.folder / "program.py"
    script.write_text(PROGRAM.replace("BACKEND", repr(backend)).replace("PART", repr(part)))
    started = ranks.command("-m", *command, "--nproc-per-node", "3", str(script), name="run", **variables)
    ranks.wait([started])
    assert started.code == 0, ranks.transcript()
    assert started.stderr.count(NOTE) == (1 if variables or "--as-gloo" in command else 0), started.stderr
    return [json.loads(line[line.index("{") :]) for line in started.stdout.splitlines() if "{" in line]


@pytest.mark.processes
@pytest.mark.parametrize("part", [None, "gloo"], ids=["the default's backend", "gloo again"])
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_under_torchrun(ranks: Ranks, backend: str, part: str | None) -> None:
    torchrun = ("torch.distributed.run", "--standalone")
    for one in found_by(ranks, *torchrun, backend=backend, part=part, RANKMESH_AS="gloo"):
        assert one["is"].startswith(MESH)
        assert one["config"] == "cpu:gloo"
        assert one["sum"] == [3, 3, 3]
        assert one["gradient"] == 1
        assert one["backend"] == [backend, "gloo"]
        assert one["equal"] == (backend == "gloo")
        if "part" in one:
            assert one["part"][0] == (part or backend)
            assert one["part"][1].startswith(MESH)
            assert one["part"][2] == [6, 6, 6]


@pytest.mark.processes
def test_by_an_option_of_rankmesh_run(ranks: Ranks) -> None:
    assert all(one["is"].startswith(MESH) for one in found_by(ranks, "rankmesh.run", "--as-gloo"))


@pytest.mark.processes
def test_without_it_gloo_is_gloo(ranks: Ranks) -> None:
    assert all(one["is"].startswith("torch.") for one in found_by(ranks, "rankmesh.run"))


def test_another_name_is_an_error() -> None:
    program = [sys.executable, "-c", "import torch"]
    done = subprocess.run(
        program, env={"RANKMESH_AS": "nccl"}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode
    assert "RANKMESH_AS='nccl' is not a backend of torch that RankMesh can replace: only gloo is" in done.stderr


PROGRAM_THAT_REPLACES = """\
import rankmesh.torch
import torch.distributed as dist

rankmesh.torch.replace_gloo()
rankmesh.torch.replace_gloo()
dist.init_process_group("gloo", init_method="file://" + FILE, rank=0, world_size=1)
print(type(dist.group.WORLD).__module__, dist.get_backend())
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_by_a_call(ranks: Ranks) -> None:
    program = PROGRAM_THAT_REPLACES.replace("FILE", repr(str(ranks.folder / "meeting")))
    started = ranks.command("-c", program, name="program")
    ranks.wait([started])
    assert (started.code, started.stdout) == (0, "rankmesh.torch._group gloo\n"), ranks.transcript()
    assert started.stderr.count(NOTE) == 1
