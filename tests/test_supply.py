"""What we ship of others is what they published, and may be shipped."""

import hashlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUMS = dict(
    reversed(line.split("  ", 1))
    for line in (ROOT / "locks" / "vendored.sha256").read_text().splitlines()
)
# Words of licences that let us use a package beside code of our own; MPL asks for its own files.
FREE = re.compile(r"MIT|BSD|Apache|ISC|MPL|Mozilla|PSF|Python Software|Zlib|CC0|Unlicense|CNRI")


@pytest.mark.parametrize("name", SUMS)
def test_a_vendored_file_is_as_it_was_published(name: str):
    assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest() == SUMS[name]


def test_every_vendored_file_has_a_sum():
    own = {"src/drystone/service/swagger/start.js"}
    folders = ("src/drystone/service/swagger", "tests/page/vendor")
    found = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).iterdir()
        if path.is_file()
    }
    assert found - own == set(SUMS)
    # What is minified was not written here.
    packed = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*.js")
        if max(map(len, path.read_text().splitlines()), default=0) > 1000
    ]
    assert set(packed) <= set(SUMS)


def test_the_list_of_licences_is_that_of_the_lock_and_all_will_do():
    spec = importlib.util.spec_from_file_location("licences", ROOT / "locks" / "licences.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "locks" / "LICENSES.md").read_text()
    rows = [[word.strip() for word in line.split("|")[1:4]] for line in text.splitlines()[7:]]
    assert {name: version for name, version, _ in rows} == module.locked("core.txt")
    for name, _, licence in rows:
        assert FREE.search(licence) or licence == "not on this platform", (name, licence)
        assert "GPL" not in licence, (name, licence)
