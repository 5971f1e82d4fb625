"""How Sphinx makes a site of these pages: `make docs`.

The pages are plain Markdown and know nothing of Sphinx: what the site lists at its side is read
from the links of index.md.
"""

from __future__ import annotations

import re
from typing import Any

from drystone import __version__

project = "Drystone"
author = "The Drystone maintainers"
release = __version__
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
nitpicky = True

# Links to headings, by the names that code hosts give them.
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Drystone {__version__}"
html_static_path = ["_static"]
html_css_files = ["drystone.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5c8a", "color-brand-content": "#0b5c8a"},
    "dark_css_variables": {"color-brand-primary": "#6cb8e6", "color-brand-content": "#6cb8e6"},
}


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("source-read", add_contents)


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """A table of contents for each section of the index: the pages that it links to."""
    if name != "index":
        return
    contents = []
    for section in source[0].split("\n## ")[1:]:
        pages = dict.fromkeys(re.findall(r"\]\(([\w/.-]+)\.md\)", section))
        title = section.partition("\n")[0]
        contents += ["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"]
    source[0] += "\n".join(contents) + "\n"
