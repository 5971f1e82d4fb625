"""The tree of files in ARCHITECTURE.md: each file with the first line of its docstring.

Run it with `make tree` after adding or renaming a file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "drystone"
STAGES = ("describe", "estimate", "plan", "schedule", "run", "observe", "service", "cli")
WIDTH = 28
DATA = {
    "gpus.csv": "GPU types, one a row, with source and date",
    "generations.csv": "what a GPU generation implies, one a row; incomplete rows are an error",
    "models.json": "published configs of the models known by name",
    "prices.csv": "example prices by cloud, with source and date",
}
BEGIN, END = "<!-- tree: make tree -->", "<!-- end of tree -->"


def main() -> None:
    """Replace what stands between the two marks."""
    page = ROOT / "ARCHITECTURE.md"
    text = page.read_text(encoding="utf-8")
    tree = f"{BEGIN}\n```text\n" + "\n".join(tree_lines()) + f"\n```\n{END}"
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    page.write_text(pattern.sub(lambda _: tree, text), encoding="utf-8")


def tree_lines() -> Iterator[str]:
    """One line a file, in the order in which data flows; a folder shows what it is for as well."""
    yield "src/drystone/"
    for path in sorted(PACKAGE.glob("*.py")):
        if path.name != "__init__.py":
            yield line(path.name, summary(path), depth=1)
    for stage in STAGES:
        yield from folder_lines(PACKAGE / stage, depth=1)


def folder_lines(folder: Path, *, depth: int) -> Iterator[str]:
    """A folder, its files, then the folders in it."""
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    if not any(path.name != "__init__.py" for path in folder.rglob("*.py")):
        return  # a stage that is still to come
    yield line(folder.name + "/", summary(folder / "__init__.py"), depth=depth)
    for path in files:
        yield line(path.name, summary(path), depth=depth + 1)
    for data in sorted((folder / "data").glob("*.*")):
        yield line(f"data/{data.name}", DATA.get(data.name, ""), depth=depth + 1)
    for inner in sorted(folder.iterdir()):
        if (inner / "__init__.py").is_file():
            yield from folder_lines(inner, depth=depth + 1)


def line(name: str, purpose: str, *, depth: int) -> str:
    """A name and its purpose, indented."""
    return f"{'  ' * depth + name:<{WIDTH}}{purpose}".rstrip()


def summary(path: Path) -> str:
    """The first line of a module's docstring, without the full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].removesuffix(".")


if __name__ == "__main__":
    main()
