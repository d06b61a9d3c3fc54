"""A rank of benchmarks.join: joins as the environment says, and tells the inbox how long each step took.

Run by its path, with few imports, so that its start is what a user's script would take.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any


def main() -> None:
    began, steps = float(os.environ["JOIN_BEGAN"]), {}
    last = began

    def note(step: str) -> None:
        nonlocal last
        now = time.monotonic()
        steps[step] = steps.get(step, 0.0) + now - last
        last = now

    def noting(owner: Any, name: str, step: str) -> None:
        function = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            note("rest")
            result = function(*arguments, **options)
            note(step)
            return result

        setattr(owner, name, noted)

    note("interpreter")
    import numpy as np  # noqa: F401

    note("numpy")
    import rankmesh as dist

    note("rankmesh")
    from rankmesh_agent import agent
    from rankmesh_agent.membership import gateway_client

    note("agent")
    noting(gateway_client.GatewayClient, "join", "gateway")
    noting(agent, "connect_all", "peers")
    noting(agent.Agent, "_make_group", "group")
    dist.init_process_group()
    note("rest")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outbox:
        outbox.sendto(repr({"ready": last, "steps": steps}).encode(), os.environ["JOIN_INBOX"])
    dist.barrier()  # nobody leaves while another is still on its way
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
