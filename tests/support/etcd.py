"""A real etcd, of one member, in a folder."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.me import wait_until
from support.processes import free_port


class Etcd:
    """etcd at a fixed port; tests that need it are skipped where it is not installed.

    Args:
        folder: its data.
        tls: paths of its certificate and key; None for plain HTTP.
    """

    def __init__(self, folder: Path, tls: tuple[Path, Path] | None = None) -> None:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("etcd is not installed (apt-get install etcd-server)")
        self.port, peers = free_port(), free_port()
        self._log = folder / "etcd.log"
        self._metrics = f"http://127.0.0.1:{free_port()}"
        here = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        options: Mapping[str, object] = {
            "data-dir": folder / "etcd",
            "listen-client-urls": here,
            "advertise-client-urls": here,
            "listen-peer-urls": f"http://127.0.0.1:{peers}",
            "initial-advertise-peer-urls": f"http://127.0.0.1:{peers}",
            "initial-cluster": f"default=http://127.0.0.1:{peers}",
            "listen-metrics-urls": self._metrics,
            **({"cert-file": tls[0], "key-file": tls[1]} if tls else {}),
        }
        self._command = [program, *(f"--{name}={value}" for name, value in options.items())]
        self.start()

    def url(self, prefix: str = "") -> str:
        """Return the URL of a prefix, by default of a new one."""
        return f"etcd://127.0.0.1:{self.port}/{prefix or secrets.token_hex(4)}"

    def start(self) -> None:
        """Start it, for the first time or after ``stop``."""
        with self._log.open("ab") as log:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        wait_until(self._is_healthy, "etcd")

    def stop(self, number: int = signal.SIGKILL) -> None:
        """End it."""
        self.process.send_signal(number)
        self.process.wait(20)

    def _is_healthy(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"{self._metrics}/health", timeout=1) as answer:
                return b"true" in answer.read()
        except OSError:
            return False
