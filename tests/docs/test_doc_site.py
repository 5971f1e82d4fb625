"""The site of docs/ is made without a warning and needs no network; its reference is up to date."""

import re
import subprocess
import sys

import pytest
from doc_blocks import DOCS, ROOT, pages

pytestmark = pytest.mark.slow


def test_the_reference_is_what_the_code_says():
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate_reference.py"), "--check"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.xdist_group("doc site")
def test_the_site_is_made_without_a_warning_and_needs_no_network(tmp_path):
    pytest.importorskip("sphinx")
    made = tmp_path / "html"
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q",
         "-d", str(tmp_path / "trees"), str(DOCS), str(made)],
        capture_output=True, text=True, check=False, timeout=300, cwd=ROOT,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    names = [one.removeprefix("docs/")[:-3] for one in pages() if one.startswith("docs/")]
    assert [name for name in names if not (made / f"{name}.html").is_file()] == []
    for path in made.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"([^\"]+)\"", text)
        assert [one for one in loaded if "//" in one] == [], path
    # What stands at the side is what the index links to.
    index = (made / "index.html").read_text(encoding="utf-8")
    assert all(f'href="{name}.html"' in index for name in names if name != "index")
