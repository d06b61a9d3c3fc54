"""Questions in JSON over one HTTP connection, against a server that is told what to answer."""

from __future__ import annotations

import gzip
import io
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from support.processes import free_port

from rankmesh_agent.net.http_client import HttpClient, NoResponseError, ResponseTooLargeError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n" + b'{"a": 1}'


class Server:
    """Answers each request with the next of some raw answers; None closes the connection instead."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.answers: list[bytes | None] = []
        self.heard: list[bytes] = []
        self.connections = 0
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while self.answers or not self.heard:
            try:
                peer = self.listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            peer.settimeout(10)
            with peer, peer.makefile("rb") as stream:
                while request := self.request(stream):
                    self.heard.append(request)
                    answer = self.answers.pop(0)
                    peer.sendall(answer or b"")
                    if answer is None or b"Connection: close" in answer:
                        break
            self.closed.set()

    def request(self, stream: io.BufferedReader) -> bytes:
        head = b""
        while (line := stream.readline()).strip():
            head += line
        length = re.search(rb"(?i)content-length: (\d+)", head)
        return head + line + stream.read(int(length[1]) if length else 0)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.listener.shutdown(socket.SHUT_RDWR)
    made.listener.close()
    made.thread.join(10)


@pytest.fixture
def asker() -> Iterator[HttpClient]:
    made = HttpClient()
    yield made
    made.close()


def test_the_connection_is_kept_and_the_document_goes_along(server, asker):
    server.answers = [OK, OK]
    for _ in range(2):
        answer = asker.request("POST", f"{server.url}/v1/join", {"rank": 0}, timeout=10)
        assert (answer.status, answer.json()) == (200, {"a": 1})
    assert server.connections == 1
    head, _, body = server.heard[1].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/join HTTP/1.1\r\n")
    assert b"content-type: application/json" in head
    assert body == b'{"rank":0}'


def test_without_a_token_or_a_document_neither_goes_along(server, asker):
    server.answers = [OK]
    assert asker.request("GET", f"{server.url}/health", timeout=10).json() == {"a": 1}
    assert b"authorization" not in server.heard[0].lower()
    assert b"content-type" not in server.heard[0].lower()


def test_one_that_the_server_has_closed_is_opened_again(server, asker):
    server.answers = [OK, OK]
    asker.request("GET", server.url + "/", timeout=10)
    asker._connection.sock.shutdown(socket.SHUT_RDWR)  # as if it had been idle for too long
    assert server.closed.wait(10)
    assert asker.request("GET", server.url + "/", timeout=10).status == 200
    assert server.connections == 2


def test_whatever_the_status_it_is_an_answer(server, asker):
    server.answers = [b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\nclosing", OK]
    answer = asker.request("POST", server.url + "/", {}, timeout=10)
    assert (answer.status, answer.body) == (503, b"closing")
    with pytest.raises(ValueError, match="Expecting value"):
        answer.json()
    assert asker.request("POST", server.url + "/", {}, timeout=10).status == 200


@pytest.mark.parametrize("answer", [None, b"220 smtp.example.com\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n"])
def test_no_answer_or_none_in_http_then_another_question(server, asker, answer):
    server.answers = [None if answer is None else answer + b"Connection: close\r\n\r\n", OK]
    with pytest.raises(NoResponseError):
        asker.request("GET", server.url + "/", timeout=10)
    assert asker.request("GET", server.url + "/", timeout=10).status == 200


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_the_limit_is_that_of_the_body_as_it_is_read(server, asker, packed):
    body = b"x" * 1000
    sent, field = (gzip.compress(body), b"Content-Encoding: gzip\r\n") if packed else (body, b"")
    server.answers = [b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (field, len(sent), sent)] * 2
    with pytest.raises(ResponseTooLargeError, match="more than 999 bytes"):
        asker.request("GET", server.url + "/", timeout=10, limit=999)
    assert asker.request("GET", server.url + "/", timeout=10, limit=1000).body == body


def test_nobody_there(asker):
    with pytest.raises(NoResponseError, match="Connection refused"):
        asker.request("GET", f"http://127.0.0.1:{free_port()}/", timeout=10)


def test_somebody_who_says_nothing_and_the_late_answer_is_not_the_next_ones(asker):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(NoResponseError, match="timed out"):
            asker.request("GET", url, timeout=0.05)
        assert asker._connection is None


@pytest.mark.parametrize("url", ["no url", "http://[", "ftp://127.0.0.1:1/", "http:///path", "http://a:99999/"])
def test_what_is_no_url(asker, url):
    with pytest.raises(ValueError, match=r"URL|port|Port"):
        asker.request("GET", url, timeout=1)
