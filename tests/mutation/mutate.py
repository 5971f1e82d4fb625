"""Mutation testing of the pure stages: small changes of meaning that tests must notice.

    make mutants                      # 200 mutants of estimate, plan and schedule, seed 1
    make mutants ARGS="--number 20 --seed 7 --only schedule/prices"

Each mutant is a copy of one file with one operator, comparison, number or function changed. The
tests nearest to the file run first, then those of its stage, then the whole fast suite; the first
failure kills the mutant. Survivors are printed with the line they change: each is a test that is
missing, or a change that means nothing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "drystone"
TESTS = ROOT / "tests"
STAGES = ("estimate", "plan", "schedule")
# Long enough for a slow machine; a mutant that loops for ever is killed by it.
TIMEOUT_SECONDS = 900

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip
TWINS = {
    "min": "max", "minimum": "maximum", "argmin": "argmax", "any": "all", "ceil": "floor",
    "floor": "ceil", "max": "min", "maximum": "minimum", "argmax": "argmin", "all": "any",
}  # fmt: skip
# Messages and checks of our own mistakes have no meaning that a test should pin down.
UNMUTATED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.arguments)


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    path: str  # below src/drystone
    line: int
    kind: str
    before: str
    after: str
    index: int  # of the change among those of the file


def main() -> int:
    """Make mutants, run the tests against each, and say which survived."""
    options = parse_options()
    everything = [mutant for path in source_files(options.only) for mutant in mutants_of(path)]
    chosen = random.Random(options.seed).sample(everything, min(options.number, len(everything)))
    print(f"{len(chosen)} of {len(everything)} mutants, seed {options.seed}", flush=True)
    with ThreadPoolExecutor(options.workers) as pool:
        outcomes = list(pool.map(lambda mutant: (mutant, try_mutant(mutant)), chosen))
    survivors = [mutant for mutant, killer in outcomes if not killer]
    for mutant in sorted(survivors, key=lambda mutant: (mutant.path, mutant.line)):
        print(f"SURVIVED {mutant.path}:{mutant.line}: {mutant.before}  ->  {mutant.after}")
    share = 1 - len(survivors) / max(len(chosen), 1)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed, {share:.1%}")
    if options.output:
        told = [asdict(mutant) | {"killed_by": killer} for mutant, killer in outcomes]
        options.output.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if share >= options.at_least else 1


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a folder or file below src/drystone")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--at-least", type=float, default=0.85, help="share that must be killed")
    parser.add_argument("--output", type=Path, help="write all outcomes as JSON")
    return parser.parse_args()


def source_files(only: str) -> Iterator[Path]:
    """Files of the pure stages, in a fixed order."""
    for stage in STAGES:
        for path in sorted((SOURCE / stage).rglob("*.py")):
            if str(path.relative_to(SOURCE)).startswith(only):
                yield path


def mutants_of(path: Path) -> list[Mutant]:
    """Every change that this file offers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = str(path.relative_to(SOURCE))
    found = []
    for index, (node, kind, change) in enumerate(changes_in(tree)):
        before = ast.unparse(node)
        changed = copy.deepcopy(node)
        change(changed)
        found.append(Mutant(name, node.lineno, kind, before, ast.unparse(changed), index))
    return found


Change = Callable[[ast.AST], None]


def changes_in(tree: ast.AST) -> Iterator[tuple[ast.expr, str, Change]]:
    """Expressions that can be changed, with what changes them; always in the same order."""
    for node in walk_meaning(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield node, "comparison", swap_comparison
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield node, "operator", swap_operator
        elif isinstance(node, ast.BoolOp):
            yield node, "and/or", swap_boolean
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield node, "sign", drop_sign
        elif isinstance(node, ast.Call) and called_name(node) in TWINS:
            yield node, "function", swap_function
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node, "number", change_number


def walk_meaning(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes in order, without types, messages and assertions."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, UNMUTATED):
            continue
        if isinstance(child, (ast.AnnAssign, ast.FunctionDef)):
            child = copy.copy(child)  # without its annotations
            if isinstance(child, ast.AnnAssign):
                child.annotation = ast.Name("object", ast.Load())
            else:
                child.returns, child.decorator_list = None, []
        yield child
        yield from walk_meaning(child)


def swap_comparison(node: ast.AST) -> None:
    """`<` becomes `<=`, `==` becomes `!=`."""
    assert isinstance(node, ast.Compare)
    node.ops[0] = COMPARISONS[type(node.ops[0])]()


def swap_operator(node: ast.AST) -> None:
    """`+` becomes `-`, `*` becomes `/`."""
    assert isinstance(node, ast.BinOp)
    node.op = OPERATORS[type(node.op)]()


def swap_boolean(node: ast.AST) -> None:
    """`and` becomes `or`."""
    assert isinstance(node, ast.BoolOp)
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()


def drop_sign(node: ast.AST) -> None:
    """`not x` becomes `not not x`, `-x` becomes `+x`."""
    assert isinstance(node, ast.UnaryOp)
    if isinstance(node.op, ast.Not):
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
    else:
        node.op = ast.UAdd()


def called_name(node: ast.Call) -> str:
    """`max` of `max(...)`, `np.max(...)` and `x.max(...)`."""
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def swap_function(node: ast.AST) -> None:
    """`min` becomes `max`."""
    assert isinstance(node, ast.Call)
    if isinstance(node.func, ast.Name):
        node.func.id = TWINS[node.func.id]
    elif isinstance(node.func, ast.Attribute):
        node.func.attr = TWINS[node.func.attr]


def change_number(node: ast.AST) -> None:
    """A whole number grows by one, any other by a tenth."""
    assert isinstance(node, ast.Constant)
    node.value = node.value + 1 if isinstance(node.value, int) else node.value * 1.1 or 0.1


def try_mutant(mutant: Mutant) -> str:
    """The first group of tests that fails with this change; empty where all pass."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder) / "drystone"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        (source / mutant.path).write_text(mutated_text(mutant), encoding="utf-8")
        for name, tests in test_groups(mutant.path):
            if tests and not passes(tests, Path(folder)):
                print(f"killed by {name}: {mutant.path}:{mutant.line}", flush=True)
                return name
    print(f"survived: {mutant.path}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)
    return ""


def mutated_text(mutant: Mutant) -> str:
    """The file with its change; comments and layout are lost, which no test sees."""
    tree = ast.parse((SOURCE / mutant.path).read_text(encoding="utf-8"))
    for index, (node, _, change) in enumerate(changes_in(tree)):
        if index == mutant.index:
            change(node)
            break
    return ast.unparse(tree) + "\n"


def test_groups(path: str) -> Iterator[tuple[str, list[str]]]:
    """Groups of tests, the nearest first; no file twice."""
    seen: set[str] = set()
    for name, found in (
        ("its own tests", tests_naming(path)),
        (
            "tests of its stage",
            sorted((ROOT / "tests" / "unit" / path.split("/")[0]).rglob("test_*.py")),
        ),
        ("the fast suite", fast_files()),
    ):
        new = [str(test) for test in found if str(test) not in seen]
        seen.update(new)
        yield name, new


def tests_naming(path: str) -> list[Path]:
    """Test files that import this module, or are named after it."""
    module = "drystone." + path.removesuffix(".py").replace("/", ".")
    stem = Path(path).stem
    return [
        test
        for test in fast_files()
        if test.name == f"test_{stem}.py" or module in test.read_text(encoding="utf-8")
    ]


def fast_files() -> list[Path]:
    """All files of the fast suite that exercise the pure stages."""
    folders = ("unit", "properties", "oracles", "golden", "accuracy")
    return sorted(test for name in folders for test in (TESTS / name).rglob("test_*.py"))


def passes(tests: list[str], folder: Path) -> bool:
    """Whether these tests pass with the changed copy in place of the package."""
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not slow", "--no-header",
        "-p", "no:cacheprovider", "--tb=no", *tests,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, 5)  # 5: all of them are slow


if __name__ == "__main__":
    sys.exit(main())
