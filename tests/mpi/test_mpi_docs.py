"""docs/mpi.md: its script prints what it says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from support.consoles import below, run, steps_of
from support.mpi import MPIRUN, OPTIONS
from support.processes import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "mpi.md"


def test_the_script_prints_what_the_page_says(ranks: Ranks) -> None:
    page = below(PAGE.read_text(), "The cluster's MPI")
    script = re.search(r"^```python\n# script.py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert script is not None
    (ranks.folder / "script.py").write_text(script[1])
    (step,) = [each for each in steps_of(page) if each.command.startswith("mpirun")]
    assert step.command == "mpirun -n 4 python script.py"
    assert MPIRUN is not None
    path = os.pathsep.join([str(Path(MPIRUN).parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    # What the page says of roots, and of hosts with few cores.
    command = step._replace(command=step.command.replace("mpirun", f"mpirun {' '.join(OPTIONS)}"))
    (printed,) = run([command], ranks.folder, ranks.environment(PATH=path), 60)
    assert sorted(filter(None, printed.splitlines())) == step.printed.splitlines()
