"""The reference pages' examples give the output they document, at the number of ranks they document."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import pytest
from support.once import Reports, once
from support.processes import Me, Rank, Ranks, free_port, wait_until
from support.reference import EXAMPLES, shown

import rankmesh as dist

pytestmark = pytest.mark.processes

Printed = Callable[[int], Reports]


def all_examples(me: Me) -> None:
    me.init(timeout=60)
    for name, example in EXAMPLES.items():
        if len(example.shows) == me.size:
            me.report(**{name: list(map(shown, example.run(me.rank, me.size)))})
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """What the examples for a number of ranks showed."""
    return once(tmp_path_factory, lambda ranks, size: [rank.reported for rank in ranks.run(all_examples, size)])


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_shows_what_its_page_says(printed: Printed, name: str) -> None:
    shows = EXAMPLES[name].shows
    assert [of_rank[name] for of_rank in printed(len(shows))] == [list(map(shown, values)) for values in shows]


# Whole programs


def run_program(ranks: Ranks, source: str, **variables: str) -> Rank:
    """Run a program that spawns its ranks; return the process, which has ended."""
    path = ranks.folder / "program.py"
    path.write_text(textwrap.dedent(source))
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    program = ranks.command(str(path), name="program", **address, **variables)
    ranks.wait([program])
    wait_until(lambda: not ranks.left(), "multiprocessing's helper to end")
    return program


def test_the_monitored_barrier_program_says_which_rank_failed(ranks: Ranks) -> None:
    program = run_program(
        ranks,
        """\
        from datetime import timedelta

        import rankmesh as dist
        import rankmesh.multiprocessing as mp


        def worker(rank):
            dist.init_process_group("gloo", rank=rank, world_size=2)
            group_gloo = dist.new_group(backend="gloo")
            if rank not in [1]:
                dist.monitored_barrier(group=group_gloo, timeout=timedelta(seconds=1))


        if __name__ == "__main__":
            mp.spawn(worker, nprocs=2, args=())
        """,
    )
    assert program.code != 0
    assert "in worker" in program.stderr
    assert "rank 1 " in program.stderr.strip().splitlines()[-1]


def test_the_debug_program_says_which_shapes_do_not_match(ranks: Ranks) -> None:
    program = run_program(
        ranks,
        """\
        import numpy as np

        import rankmesh as dist
        import rankmesh.multiprocessing as mp


        def worker(rank):
            dist.init_process_group("gloo", rank=rank, world_size=2)
            tensor = np.random.randn(10 if rank == 0 else 20)
            dist.all_reduce(tensor)


        if __name__ == "__main__":
            mp.spawn(worker, nprocs=2, args=())
        """,
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    )
    assert program.code != 0
    told = program.stderr.strip().splitlines()[-1]
    assert "CollectiveMismatchError" in told
    for rank, length in enumerate((10, 20)):
        call, details = f"rank {rank}: all_reduce(float64[{length}], SUM)", f"float64 ({length},)"
        assert re.search(rf"{re.escape(call)} \(called at \S+program.py:10 in worker, {re.escape(details)}\)", told)


def test_the_summary_pages_program_prints_the_sum(ranks: Ranks) -> None:
    program = run_program(
        ranks,
        f"""\
        import numpy as np

        import rankmesh as dist
        import rankmesh.multiprocessing as mp


        def setup(rank, world_size):
            dist.init_process_group(
                backend="gloo",
                init_method="tcp://127.0.0.1:{free_port()}",
                world_size=world_size,
                rank=rank,
            )


        def cleanup():
            dist.destroy_process_group()


        def demo_basic(rank, world_size):
            setup(rank, world_size)
            tensor = np.ones((2, 2))
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
            print(f"Rank {{rank}}: {{tensor.tolist()}}")
            cleanup()


        if __name__ == "__main__":
            world_size = 2
            mp.spawn(demo_basic, args=(world_size,), nprocs=world_size)
        """,
    )
    assert (program.code, program.complaints) == (0, "")
    # Unbuffered, a line and its end are written apart, and the other rank may come between.
    told = sorted(re.findall(r"Rank .*?\]\]", program.stdout))
    assert told == [f"Rank {rank}: [[2.0, 2.0], [2.0, 2.0]]" for rank in range(2)]
