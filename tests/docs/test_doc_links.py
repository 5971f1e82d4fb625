"""Links of the README and of docs/: pages, headings and files are there; every page is found."""

import ast
import re
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from doc_blocks import DOCS, ROOT, pages, prose_of, read

PAGES = pages()
PACKAGE = ROOT / "src" / "drystone"
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)


def links(page: str) -> list[str]:
    """Where a page points to; code is no link."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "`", prose_of(page)))


@cache
def anchors(page: str) -> frozenset[str]:
    """The names that code hosts give to the headings of a page."""
    found: list[str] = []
    for _, title in _HEADING.findall(prose_of(page)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = sum(one == name or one.startswith(f"{name}-") for one in found)
        found.append(f"{name}-{number}" if name in found else name)
    return frozenset(found)


def broken(page: str, target: str) -> str:
    """What is wrong with a link, if anything."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        is_right = parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc)
        return "" if is_right else f"{target} is not the address of a page"
    path = (ROOT / page).parent / parts.path if parts.path else ROOT / page
    if not path.exists():
        return f"{target}: there is no {parts.path}"
    if not path.resolve().is_relative_to(DOCS) and page.startswith("docs/"):
        return f"{target} is outside of the site"
    if parts.fragment:
        other = str(path.resolve().relative_to(ROOT))
        if parts.fragment not in anchors(other):
            return f"{target}: no such heading; there are {sorted(anchors(other))}"
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert [one for one in (broken(page, target) for target in links(page)) if one] == []


def test_broken_links_are_found():
    assert broken("README.md", "docs/nothing.md")
    assert broken("docs/index.md", "tutorial.md#nothing")
    assert broken("docs/index.md", "http://")
    assert broken("docs/index.md", "../README.md")
    assert not broken("docs/index.md", "tutorial.md#7-end")


def test_every_page_is_found_from_the_index():
    index = {(DOCS / one.partition("#")[0]).resolve() for one in links("docs/index.md")}
    every = {ROOT / page for page in PAGES if page.startswith("docs/")}

    assert sorted(every - index - {DOCS / "index.md"}) == []


def test_the_readme_leads_to_the_pages():
    found = set(links("README.md"))

    assert {"docs/index.md", "docs/tutorial.md"} <= found
    assert {one for one in links("docs/serving.md") if "." in one} >= {
        "jobs.md",
        "howto/postgres.md",
    }


@pytest.mark.parametrize("page", PAGES)
def test_files_and_functions_that_a_page_names_are_there(page):
    assert [one for one in _missing(page) if one] == []


def _missing(page: str) -> list[str]:
    text = prose_of(page)
    found = []
    for name in re.findall(r"`([\w/*.-]+/[\w*.-]+\.\w+)(?::\w+)?(?: [^`]*)?`", text):
        bases = _bases(name)
        if bases and not any(next(iter(base.glob(name)), None) for base in bases):
            found.append(f"no {name}")
    for name, functions in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", text):
        path = PACKAGE / name
        if path.is_file():
            known = _defined(path)
            found += [
                f"{name}: no {one}" for one in re.findall(r"\w+", functions) if one not in known
            ]
    return found


def _bases(name: str) -> list[Path]:
    """Where a path may start: at the top, in the package, or in one of its folders."""
    top = name.partition("/")[0]
    if top in ("tests", "benchmarks", "examples", "docs", "src"):
        return [ROOT]
    stages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    return [PACKAGE] if top in stages else []


@cache
def _defined(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(
        node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)
    )


def test_the_page_of_job_files_names_every_key():
    from drystone.describe.files import job_parts
    from drystone.describe.files.reader import Part

    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose_of("docs/jobs.md")))))
    parts = [
        part
        for part in vars(job_parts).values()
        if isinstance(part, type) and issubclass(part, Part)
    ]
    fields = {field.alias or name for part in parts for name, field in part.model_fields.items()}

    assert sorted(fields - named) == []


def test_no_page_is_empty():
    assert [page for page in PAGES if not read(page).startswith("# ")] == []
