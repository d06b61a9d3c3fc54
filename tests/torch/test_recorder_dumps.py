"""``rankmesh diagnose DIR`` of dumps that torch's own flight recorder has written, over gloo."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d
from support.command import here
from support.processes import Me, Ranks, wait_until
from torch._C import _distributed_c10d as recorder

pytestmark = pytest.mark.processes


def dump_json() -> bytes:
    return recorder._dump_fr_trace_json(includeCollectives=True, onlyActive=False)


def record(me: Me) -> None:
    """Write dumps while rank 2 has not come to a call."""
    store = c10d.FileStore(str(me.folder / "store"), me.size)
    timeout = datetime.timedelta(seconds=60)
    c10d.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size, timeout=timeout)
    data = torch.ones(10)
    c10d.all_reduce(data)
    c10d.barrier()
    pending = c10d.all_reduce(data, async_op=True) if me.rank != 2 else None
    wait_until(
        lambda: [each["retired"] for each in json.loads(dump_json())["entries"]][:2] == [True, True], "the calls"
    )
    for form in ("json", "pickle"):
        (me.folder / form).mkdir(exist_ok=True)
    (me.folder / "json" / f"nccl_trace_rank_{me.rank}").write_bytes(dump_json())
    dump = recorder._dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    (me.folder / "pickle" / f"nccl_trace_rank_{me.rank}").write_bytes(dump)
    store.set(f"written/{me.rank}", "")
    store.wait(["written/0", "written/1"], timeout)
    if pending is None:
        c10d.all_reduce(data)
    else:
        pending.wait()
    c10d.destroy_process_group()


@pytest.mark.skipif(not hasattr(recorder, "_dump_fr_trace_json"), reason="torch's gloo has no flight recorder yet")
def test_dumps_of_gloo(ranks: Ranks) -> None:
    ranks.succeed(ranks.start(record, 3))
    code, stdout, stderr = here("diagnose", str(ranks.folder / "json"))
    assert (code, stderr) == (1, "")
    assert stdout.startswith("rank 2 has not come to all_reduce #3 for ")
    assert "; its last operation was barrier() #2; ranks 0-1 wait\n  last common operation: barrier() #2, " in stdout
    code, stdout, _ = here("diagnose", str(ranks.folder / "pickle"))
    assert code == 1
    name = Path(__file__).name
    assert f"its last operation was barrier() #2 at {name}:" in stdout
    assert f"ranks 0-1 wait at {name}:" in stdout
