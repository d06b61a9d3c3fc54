"""Print a compose override for another number of agents than compose.yaml's four.

    python3 docker/agents.py 8 > compose.override.yaml      # Compose reads that file by itself from now on

Compose cannot count: services that differ in their name and port have to be written down one by one.
"""

from __future__ import annotations

import argparse

DEFAULT = 4
FIRST_PORT = 8701
MOST = 256


def override(agents: int) -> str:
    """Return the override file for so many agents."""
    lines = [f"# {agents} agents: written by docker/agents.py, not to be edited.", "services:"]
    if agents == DEFAULT:
        lines[1] = "services: {}"
    lines += [f"  agent-{number}: {{deploy: {{replicas: 0}}}}" for number in range(agents, DEFAULT)]
    for number in range(DEFAULT, agents):
        port = FIRST_PORT + number
        command = f"python -m rankmesh_agent --host 0.0.0.0 --port {port} --url http://127.0.0.1:{port}"
        lines += [
            f"  agent-{number}:",
            "    extends: {file: compose.yaml, service: agent-0}",
            f"    hostname: agent-{number}",
            f"    command: {command}",
            f"    environment: {{HEALTH_PORT: {port}}}",
            f'    ports: !override ["127.0.0.1:{port}:{port}"]',
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the override for the command line's number of agents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", type=int, help=f"how many, 1 to {MOST}")
    agents = parser.parse_args().agents
    if not 1 <= agents <= MOST:
        parser.error(f"{agents} agents: give a number from 1 to {MOST}")
    print(override(agents), end="")


if __name__ == "__main__":
    main()
