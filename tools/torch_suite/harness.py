"""Runs torch's distributed tests over a backend: ``python -m tools.torch_suite.harness PLAN``, a Plan as JSON.

The tests are ``torch.testing._internal.distributed.distributed_test``, which PyTorch's own test_distributed_spawn.py
runs. That file is written for a fixed set of backends: when it is imported, it looks at BACKEND to decide which tests
there are. So it is imported as if for one of those (``Plan.like``), and then:

* its BACKEND becomes the one to be tested, so that is what the tests make their groups with;
* where only the name is looked at, it is the old one: in ``_test_accumulate_gradients_no_sync``, which makes its
  model only for some of torch's own backends;
* ``torch.distributed.monitored_barrier``, which refuses groups that are not gloo's, is rankmesh.torch's for others.

Nothing else of the tests is changed. Two things the tests themselves check for torch's own backends only: the names of
events in profiles, and gloo's variables in what DistributedDataParallel logs.

Tests are run in torch's way (MultiProcessTestCase) with these differences, which are the same for gloo:

* ranks are forked from this process, which has imported everything and started nothing, instead of being spawned: 20 ms
  instead of 3 s of processor time a rank;
* each test has the plan's deadline, and what is left of it then is killed;
* every rank has to end well: torch looks at the exit code of rank 0, and in the others for Python's exceptions;
* at the beginning and the end of a test ranks wait for each other until the deadline, not for ten seconds.

A line of JSON per test, an Outcome, goes to standard output; what ranks print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import tempfile
import time
import unittest
from typing import Any
from unittest.mock import patch

from tools.torch_suite import FAILED, PASSED, SKIPPED, Outcome, Plan, host_memory

OF_A_RANK = (
    "rankmesh.torch._factory",
    "rankmesh_agent.agent",
    "rankmesh_agent.http.uvicorn_server",
    "rankmesh_gateway.http.app",
)
"""What a rank would load when its first group is made, half a second of processor time."""


def main(plan: Plan) -> None:
    """Run the tests of a plan."""
    told = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the ranks print there
    suite = load(plan)
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # tests that fail leave files behind
        for name in plan.names or unittest.TestLoader().getTestCaseNames(suite):
            print(json.dumps(outcome(suite(name))), file=told, flush=True)


def load(plan: Plan) -> type[unittest.TestCase]:
    """Import torch's tests and return them as a test case whose ranks use the plan's backend."""
    # Read when the file is imported. INIT_METHOD is replaced before each test; some tests are there for files only.
    os.environ |= {"BACKEND": plan.like, "WORLD_SIZE": str(plan.size), "INIT_METHOD": "file:///replaced"}
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"

    if plan.gpus_in_host_memory:
        host_memory.prepare()

    import torch.distributed as dist
    from torch import multiprocessing
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as theirs

    gloos = dist.monitored_barrier

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        over_mesh = isinstance(dist.group.WORLD if group is None else group, rankmesh.torch.ProcessGroup)
        return (rankmesh.torch.monitored_barrier if over_mesh else gloos)(group, timeout, wait_all_ranks)

    if plan.backend == "rankmesh":
        import rankmesh.torch

        for name in OF_A_RANK:
            importlib.import_module(name)
        dist.monitored_barrier = monitored_barrier
    theirs.BACKEND = plan.backend
    common_distributed.get_timeout = lambda _: plan.deadline

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        """Torch's tests, in ranks that are forked."""

        def setUp(self) -> None:
            super().setUp()
            theirs.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            for process in self.processes:
                process.kill()
                process.join()
            super().tearDown()

        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            super()._barrier(*args, **{**kwargs, "timeout": plan.deadline})

        def _check_return_codes(self, *args: Any) -> None:  # without the test in older versions of torch
            super()._check_return_codes(*args)
            if args[0] not in self.skip_return_code_checks:
                assert [process.exitcode for process in self.processes] == [0] * plan.size

        def _test_accumulate_gradients_no_sync(self, *args: Any, **kwargs: Any) -> None:
            with patch.object(theirs, "BACKEND", plan.like):
                super()._test_accumulate_gradients_no_sync(*args, **kwargs)

    return Suite


def outcome(test: unittest.TestCase) -> Outcome:
    """Run one test and return what became of it."""
    result = unittest.TestResult()
    began, used = time.monotonic(), _processor_time()
    test.run(result)
    seconds, cpu = time.monotonic() - began, _processor_time() - used
    if result.skipped:
        became, reason = SKIPPED, result.skipped[0][1]
    elif result.wasSuccessful():
        became, reason = PASSED, ""
    else:
        became, reason = FAILED, "\n".join(text for _, text in [*result.errors, *result.failures])
    return Outcome(test._testMethodName, became, reason, round(seconds, 2), round(cpu, 2))


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(Plan(*json.loads(sys.argv[1])))
