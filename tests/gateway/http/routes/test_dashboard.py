"""The dashboard's files, as they are served; tests/dashboard looks at them in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankmesh_gateway import dashboard

pytestmark = pytest.mark.anyio

FOLDER = Path(dashboard.__file__).parent
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@pytest.fixture
def client(direct):
    del direct.headers["Authorization"]
    return direct


async def test_files_are_served_to_everybody(client):
    tags = set()
    for path in dashboard.paths():
        answer = await client.get(path)
        name = path.removeprefix(dashboard.PREFIX).strip("/") or dashboard.PAGE
        assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes())
        assert answer.headers["content-type"].partition(";")[0] == TYPES[Path(name).suffix]
        policy = dict(each.strip().split(" ", 1) for each in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        tags.add(answer.headers["etag"])
    assert len(tags) == len(dashboard.paths()) == len(dashboard.names())


@pytest.mark.parametrize("given", ["{}", "W/{}", '"other", {}', "*"])
async def test_what_the_client_has_is_not_sent_again(client, given):
    first = await client.get("/")
    again = await client.get("/", headers={"If-None-Match": given.format(first.headers["etag"])})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]


@pytest.mark.parametrize("path", ["none.js", "__init__.py", "..%2Fapp.py", "%2e%2e/app.py", "index.html", ""])
async def test_nothing_else_is_open(client, path):
    assert (await client.get(dashboard.PREFIX + path)).status_code == 401
    bearer = {"Authorization": "Bearer secret"}
    answer = await client.get(dashboard.PREFIX + path, headers=bearer)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


def test_the_page_and_its_parts_are_complete_and_need_nothing_else():
    names = dashboard.names()
    wanted = {dashboard.PAGE}
    for name in names:
        text = (FOLDER / name).read_text()
        wanted |= set(re.findall(r'(?:src|href)="dashboard/([^"]+)"', text)) | set(
            re.findall(r'from "\./([^"]+)"', text)
        )
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {
            "http://www.w3.org/2000/svg",
            "http://…/v1/ranks</code>",
        }
        assert not addresses, name
    assert wanted == names


def test_text_is_never_parsed_as_markup_or_code():
    sinks = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|setHTML|DOMParser")
    for name in dashboard.names():
        text = (FOLDER / name).read_text()
        assert not sinks.search(text), name
        assert not re.search(r"\son\w+=|style=|javascript:", text), f"{name}: the policy forbids it"
