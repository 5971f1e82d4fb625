"""House rules that no tool checks: the direction of imports, sizes, purity, portability."""

import ast
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "drystone"
STAGES = ("describe", "estimate", "plan", "schedule", "run", "observe", "service", "cli")
PURE_STAGES = STAGES[:4]
HEAVY_PACKAGES = {"torch": "run/train", "transformers": "run/train", "ray": "run/engines/ray"}
IMPURE_MODULES = {"time", "random", "uuid", "secrets"}
VAGUE_ENDINGS = ("Manager", "Handler", "Helper", "Util", "Utils", "Info", "Impl")
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES_OF_FILE = 400
MOST_LINES_OF_FUNCTION = 60


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed file, read once for all rules."""
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes_of(path: Path, *kinds: type[ast.AST]) -> list:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, kinds)]


def offenders(has_fault: Callable[[Path], object]) -> dict[str, object]:
    """What is wrong, by module; empty when nothing is."""
    faults = {str(path.relative_to(PACKAGE)): has_fault(path) for path in MODULES}
    return {name: fault for name, fault in faults.items() if fault}


def stage_of(path: Path) -> str:
    """The stage that a file belongs to; empty for the few modules at the top."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imported_names(tree: ast.Module, *, package: str) -> Iterator[str]:
    """Every dotted name that code imports, at the top or inside a function, relative ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            start = ".".join(parents) + "." if node.level else ""
            module = (start + (node.module or "")).rstrip(".")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def imports_of(path: Path) -> frozenset[str]:
    package = ".".join(("drystone", *path.relative_to(PACKAGE).parent.parts))
    return frozenset(imported_names(tree_of(path), package=package))


def later_imports(stage: str, names: Iterable[str]) -> list[str]:
    """The names that belong to a stage after `stage`; the modules at the top come before all."""
    later = STAGES[STAGES.index(stage) + 1 :] if stage else STAGES
    return sorted(
        name for name in names if name.startswith("drystone.") and name.split(".")[1] in later
    )


def top_packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import drystone.plan.cells", ["drystone.plan.cells"]),
        ("from drystone.plan import cells", ["drystone.plan", "drystone.plan.cells"]),
        ("from drystone import plan", ["drystone.plan"]),
        ("from ..plan import cells", ["drystone.plan", "drystone.plan.cells"]),
        ("def f():\n    from drystone.cli import main", ["drystone.cli", "drystone.cli.main"]),
        ("from drystone.describe import model", []),
        ("from . import memory", []),
    ],
)
def test_the_check_itself_sees_every_kind_of_import(source: str, found: list[str]):
    names = imported_names(ast.parse(source), package="drystone.estimate")

    assert later_imports("estimate", names) == found


def test_imports_go_one_way():
    def wrong(path: Path) -> object:
        if path.name == "__main__.py" and path.parent == PACKAGE:
            return []  # `python -m drystone` is the command line
        stage = stage_of(path)
        if stage not in ("", *STAGES):
            return f"{stage} is not a stage"
        return later_imports(stage, imports_of(path))

    assert offenders(wrong) == {}


def test_heavy_packages_are_imported_in_one_place_each():
    def wrong(path: Path) -> set[str]:
        allowed = {
            name for name, home in HEAVY_PACKAGES.items() if path.is_relative_to(PACKAGE / home)
        }
        return (top_packages(path) & HEAVY_PACKAGES.keys()) - allowed

    assert offenders(wrong) == {}


def test_the_first_four_stages_know_no_clock_and_no_chance():
    assert (
        offenders(
            lambda path: stage_of(path) in PURE_STAGES and top_packages(path) & IMPURE_MODULES
        )
        == {}
    )


def test_only_the_command_line_prints():
    def wrong(path: Path) -> list[int]:
        if stage_of(path) == "cli":
            return []
        calls = nodes_of(path, ast.Call)
        return [
            node.lineno
            for node in calls
            if isinstance(node.func, ast.Name) and node.func.id == "print"
        ]

    assert offenders(wrong) == {}


def test_files_and_functions_stay_short():
    def wrong(path: Path) -> list[str]:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        long = [f"{num_lines} lines"] if num_lines > MOST_LINES_OF_FILE else []
        return long + [
            node.name
            for node in nodes_of(path, ast.FunctionDef, ast.AsyncFunctionDef)
            if (node.end_lineno or 0) - node.body[0].lineno + 1 > MOST_LINES_OF_FUNCTION
        ]

    assert offenders(wrong) == {}


def test_every_module_says_what_it_is_for():
    assert offenders(lambda path: not ast.get_docstring(tree_of(path))) == {}


def test_class_names_say_something():
    def wrong(path: Path) -> list[str]:
        names = [node.name for node in nodes_of(path, ast.ClassDef)]
        return [name for name in names if name.endswith(VAGUE_ENDINGS)]

    assert offenders(wrong) == {}


def tracked_files() -> list[Path]:
    """What git knows of; nothing where the tree is no repository."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def test_no_tracked_file_names_a_machine_or_a_package_index():
    # Written in pieces, so that this file does not match itself.
    patterns = [
        r"(?<![\w.-])/" + r"(work|root|opt|home/\w+|Users/\w+)/",
        r"(index" + r"-url|find" + r"-links)",
        r"https?://[^\s/]*" + r"(pypi|pythonhosted|mirror)",
    ]
    forbidden = re.compile("|".join(patterns))
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked_files()
        if path.is_file()
        and (match := forbidden.search(path.read_bytes().decode("utf-8", errors="ignore")))
    ]

    assert found == []


def test_architecture_names_every_module():
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    names = [path.name for path in MODULES if path.name != "__init__.py"]

    assert [name for name in names if name not in page] == []


def test_helpers_of_the_tests_have_names_of_their_own():
    # They are imported by bare name: of two with one name, half the tests would get the wrong one.
    helpers = [
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        if not path.name.startswith(("test_", "conftest"))
    ]

    assert sorted(helpers) == sorted(set(helpers))


def test_tests_of_one_group_go_to_one_worker(request: pytest.FixtureRequest):
    # pytest-xdist tells groups apart by a mark in the name; without it each worker starts its own
    # service, browser and clusters, and only the time that all of it takes would show it.
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("nothing is divided among workers by group")

    assert request.node.nodeid.endswith("@test_house")
