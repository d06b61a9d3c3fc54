"""mkdocs hooks: pages that are generated at the build, and links from the docs to files of the repository.

A linked file outside docs/ becomes a page under source/, so that the site has no link into a repository whose address
it does not know.
"""

from __future__ import annotations

import json
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import api_reference
import command_reference
import http_reference
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages in the repository's root, with their names in the site."""
HTTP = "reference/http.md"
APPENDED = {"python-api.md": api_reference.sections, "cli.md": command_reference.sections}
"""Pages that end with a reference from the code."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")
_TABS = re.compile(r"^<!-- tabs: begin -->\n(.*?)^<!-- tabs: end -->$", re.DOTALL | re.MULTILINE)
_CHART = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".cu": "cuda", ".sbatch": "bash", ".sh": "bash"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are no files of docs/."""
    for page, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / page).read_text(encoding="utf-8")))
    files.append(File.generated(config, HTTP, content=http_reference.page()))
    for path in sorted(set(linked())):
        files.append(File.generated(config, source_page(path), content=source(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to the site's pages; show sections as tabs, and the chart of imports as a table."""
    uri = page.file.src_uri
    if uri.startswith("source/") or uri == HTTP:
        return markdown
    here = origin(uri)
    markdown = _LINK.sub(lambda link: posixpath.relpath(target(here, link[1]), posixpath.dirname(uri) or "."), markdown)
    shown = _CHART.sub(imports_table, _TABS.sub(tabs, markdown))
    return shown + "".join(write() for page, write in APPENDED.items() if page == uri)


def on_page_content(html: str, page: Page, **_: Any) -> None:
    """Add the anchors of tabs to those that mkdocs knows when it checks links."""
    assert page.present_anchor_ids is not None
    page.present_anchor_ids.update(re.findall(r'<input [^>]*?id="([^"]+)" name="__tabbed', html))


def tabs(sections: re.Match[str]) -> str:
    """Return sections as tabs, which have their headings as titles and anchors."""
    _, *parts = re.split(r"^### (.*)\n", sections[1], flags=re.MULTILINE)
    shown = zip(parts[::2], parts[1::2], strict=True)
    return "\n".join(f'=== "{title}"\n{textwrap.indent(text, "    ")}' for title, text in shown)


def origin(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    return {site: path for path, site in OUTSIDE.items()}.get(uri, f"docs/{uri}")


def target(page: str, link: str) -> str:
    """Return the site's path of a link in a page of the repository."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return source_page(path) if (ROOT / path).exists() else link  # mkdocs reports a link to nothing


def linked() -> Iterator[str]:
    """Yield the files and folders outside docs/ to which pages have links."""
    for file in [*(ROOT / name for name in OUTSIDE), *(ROOT / "docs").glob("*.md")]:
        page = file.relative_to(ROOT).as_posix()
        for link in _LINK.findall(file.read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
            if not path.startswith("docs/") and path not in OUTSIDE and (ROOT / path).exists():
                yield path


def source_page(path: str) -> str:
    """Return the site's page of a file."""
    return f"source/{path}.md"


def source(path: str) -> str:
    """Return the page of a file, or of the files in a folder."""
    place = ROOT / path
    paths = [place] if place.is_file() else sorted(each for each in place.glob("*") if each.is_file())
    shown = [f"## {each.name}\n\n{code(each)}" if place.is_dir() else code(each) for each in paths]
    return "\n\n".join([f"# {path}", *shown])


def code(path: Path) -> str:
    """Return a file as a block of code, the cells of a notebook as text and blocks."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = [(each["cell_type"], "".join(each["source"])) for each in cells]
        return "\n\n".join(f"````python\n{text}\n````" if kind == "code" else text for kind, text in texts)
    return f"````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n````"


def imports_table(chart: re.Match[str]) -> str:
    """Return the arrows of a Mermaid chart as a table."""
    arrows: dict[str, list[str]] = {}
    for source, imported in re.findall(r"^  (\S+) --> (\S+)$", chart[1], re.MULTILINE):
        arrows.setdefault(source, []).append(imported)
    rows = [f"| `{source}` | `{'`, `'.join(imported)}` |" for source, imported in arrows.items()]
    return "\n".join(["| package | imports |", "|---|---|", *rows])
