"""Which code blocks does a page have, and what is to be done with each?

The language of a block decides, and a comment in its first line says why a test does less:

    sh       run by bash, a page's blocks in order, in a folder with a copy of examples/
             `# needs ...`: something that is not here; the command lines are parsed only
             `# takes ...`: too long for a test; parsed only, but simulations run with few jobs
    python   run in the same order; `# needs ...`: compiled only
    output   what the block before it prints, if that was run; `...` stands for lines left out
    yaml     read as a job, a cluster or a market, by its keys
    json     read
    text     a picture, a formula, a list of files; dockerfile: likewise
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANGUAGES = ("sh", "python", "output", "yaml", "json", "text", "dockerfile")
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def is_run(self) -> bool:
        return self.language in ("sh", "python") and not self.needs and not self.takes

    @property
    def needs(self) -> bool:
        # What is written from the code shows the examples of help texts, which may name any file.
        return self.first_line.startswith("# needs ") or self.page.startswith("docs/reference/")

    @property
    def takes(self) -> bool:
        return self.first_line.startswith("# takes ")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page, from the top of the repository."""
    found = [ROOT / "README.md", *DOCS.rglob("*.md")]
    return sorted(
        str(path.relative_to(ROOT))
        for path in found
        if "_build" not in path.relative_to(ROOT).parts
    )


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    text = read(page)
    return [
        Block(
            page=page,
            line=text[: found.start()].count("\n") + 1,
            language=found[1].strip(),
            text=found[2],
        )
        for found in _FENCE.finditer(text)
    ]


def prose_of(page: str) -> str:
    """A page without its blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", read(page)), flags=re.DOTALL)
