"""Every code block of the README and of docs/ is run, or at least read (doc_blocks.py says how).

DRYSTONE_WRITE_EXPECTED=1 writes what is printed now; look at the difference before it is committed.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from doc_blocks import LANGUAGES, ROOT, Block, blocks_of, pages, prose_of, read
from doc_commands import check_command, check_mention, command_lines
from doc_runs import difference, few_jobs, rewritten, run, runnable, script

from drystone.cli.main import run as run_command
from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import parse_job
from drystone.describe.files.market import parse_market

PAGES = pages()


def run_pages() -> list:
    """Pages with something to run, each for whichever worker is free."""
    return [
        pytest.param(page, marks=pytest.mark.xdist_group(f"doc {page}"))
        for page in PAGES
        if any(block.is_run or few_jobs(block) for block in blocks_of(page))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is_and_can_be_read(page):
    problems = [f"{block}: {one}" for block in blocks_of(page) for one in _problems(block)]

    assert problems == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_are_there(page):
    spans = re.findall(r"(?<!`)`(drystone [^`]+)`(?!`)", prose_of(page))

    assert [one for one in map(check_mention, spans) if one] == []


@pytest.fixture
def home():
    """A folder whose name is short: sockets in it may have paths of a hundred letters at most."""
    with tempfile.TemporaryDirectory(prefix="doc-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.slow
@pytest.mark.parametrize("page", run_pages())
def test_the_blocks_of_a_page_run_in_order(page, home):
    blocks = blocks_of(page)
    folder = home / "page"
    folder.mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "tests").symlink_to(ROOT / "tests")
    program = home / "page.sh"
    program.write_text(script(blocks, home), encoding="utf-8")

    code, told = run(program, folder)

    reached = len(list(home.glob("out-*"))) - 1
    assert code == 0, f"{runnable(blocks)[reached][1]} ended with {code}:\n{told[-3000:]}"
    problems, path = [], ROOT / page
    for index, block in enumerate(blocks[1:], start=1):
        if block.language != "output" or not blocks[index - 1].is_run:
            continue
        printed = (home / f"out-{index - 1}").read_text(encoding="utf-8")
        if wrong := difference(block.text, printed):
            problems.append(f"{block}: {wrong}")
            if os.environ.get("DRYSTONE_WRITE_EXPECTED"):
                new = read(page).replace(block.text, rewritten(block.text, printed), 1)
                path.write_text(new, encoding="utf-8")
    assert not problems, "\n".join(problems)


def test_the_example_trace_is_what_its_page_generates(tmp_path, monkeypatch, capsys):
    commands = [words for one in blocks_of("docs/simulate.md") for words in command_lines(one.text)]
    generate = next(words for words in commands if words[1:3] == ["trace", "generate"])
    shutil.copytree(ROOT / "examples" / "simulate", tmp_path / "examples" / "simulate")
    monkeypatch.chdir(tmp_path)

    assert run_command(generate[1:]) == 0
    assert (tmp_path / "jobs.csv").read_text() == (
        ROOT / "examples" / "simulate" / "jobs.csv"
    ).read_text()


def test_output_is_compared_line_by_line():
    assert not difference("a\n...\nd\n", "a \nb\nc\nd\n")
    assert not difference("...\nd\n", "c\nd\ne\n")  # what follows is left out
    assert "'x'" in difference("a\nx\n", "a\nb\nx2\n")
    assert difference("a\nc\n", "a\nb\nc\n")  # without dots nothing may stand between


def test_wrong_blocks_are_found():
    def problems(language: str, text: str) -> list[str]:
        return _problems(Block(page="p", line=1, language=language, text=text))

    assert problems("", "x\n")
    assert problems("sh", "drystone plna gpt2\n")
    assert problems("sh", "# needs a service\ndrystone submit --nonsense 3 | cat\n")
    assert problems("sh", "make nonsense && drystone gpus\n")
    assert problems("python", "def f(:\n")
    assert problems("yaml", "nodes: [{gpu: A100, cuont: 2}]\n")
    assert problems("yaml", "offers: [{gpu: A100}]\n")
    assert problems("yaml", "model: gpt2\ntrain: {stesp: 3}\n")
    assert problems("json", "{a: 1}\n")
    assert not problems("sh", "FOO=1 drystone gpus hopper 2> log  # all\n")
    assert "no option --nonsense" in check_mention("drystone plan gpt2 --nonsense")
    assert "no verb" in check_mention("drystone paln")


def _problems(block: Block) -> list[str]:
    if block.language not in LANGUAGES:
        return [f"its language {block.language!r} is none of {', '.join(LANGUAGES)}"]
    try:
        if block.language == "sh":
            return [one for one in map(check_command, command_lines(block.text)) if one]
        if block.language == "python":
            compile(block.text, str(block), "exec")
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            _read_yaml(block.text)
    except Exception as error:
        return [str(error)]
    return []


def _read_yaml(text: str) -> None:
    keys = set(yaml.safe_load(text))
    if "offers" in keys:
        parse_market(text)
    elif "nodes" in keys:
        parse_cluster(text)
    elif keys & {"model", "command"}:
        parse_job(text, folder=ROOT)
