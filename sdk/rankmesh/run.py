"""``python -m rankmesh.run``, for ``python -m torch.distributed.run``: the same as ``rankmesh run``."""

from __future__ import annotations

import sys

from rankmesh.launch import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m rankmesh.run"))
