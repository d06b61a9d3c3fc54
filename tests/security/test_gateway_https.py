"""The gateway's token does not go to an https server without a valid certificate."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rankmesh_gateway.clients.agent_client import AgentClient

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate"),
]


async def test_the_gateway_verifies_the_certificates_of_agents(tmp_path: Path):
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", f"{tmp_path}/key", "-out", f"{tmp_path}/certificate"]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, *files], check=True)
    received: list[str] = []

    class Impostor(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(self.headers.get("Authorization", ""))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    with HTTPServer(("127.0.0.1", 0), Impostor) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            url = f"https://127.0.0.1:{server.server_port}/v1/info"
            replies = await AgentClient("secret").request_all("GET", {0: url}, job="train", seconds=20)
        finally:
            server.shutdown()
            thread.join(30)
            assert not thread.is_alive()
    assert not replies[0].ok
    assert received == []
