"""The wheel, in an environment that has the base dependencies and nothing of the repository."""

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "drystone"
EXTRAS = {
    "data", "plots", "postgres", "sky", "solver", "runtime", "ray", "mcp", "docs", "dev",
}  # fmt: skip
CLUSTER = "nodes: [{gpu: A100-80G, count: 2, gpus_per_node: 4}, {gpu: T4, gpus_per_node: 4}]\n"
MARKET = "offers: [{gpu: A100-80G, num_gpus: 8, price_dollars_per_hour: 16.0}]\n"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]


class Installed(NamedTuple):
    """An environment with the wheel, and a folder far from the repository."""

    bin: Path
    folder: Path

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {"PATH": f"{self.bin}:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(self.folder)}
        return subprocess.run(
            [self.bin / arguments[0], *arguments[1:]], cwd=self.folder, env=kept | variables,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def answer(self, *arguments: str) -> str:
        done = self.run("drystone", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run(
        [*build, "--no-index", "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=300
    )
    return next(folder.glob("drystone-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Base dependencies are those of the running environment: the network is not needed."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(home / "env")], check=True, timeout=120
    )
    python = home / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run(
        [*pip, "--no-index", "--no-deps", "--no-warn-script-location", str(wheel)],
        check=True, timeout=120,
    )  # fmt: skip
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    for name in base_requirements():
        link_distribution(name, Path(packages.stdout.strip()))
    folder = home / "elsewhere"
    folder.mkdir()
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "market.yaml").write_text(MARKET)
    return Installed(python.parent, folder)


def base_requirements() -> set[str]:
    """What Drystone needs without any extra, and what that needs."""
    found: set[str] = set()
    wanted = [line for line in distribution("drystone").requires or [] if "extra ==" not in line]
    while wanted:
        line = wanted.pop()
        name = re.split(r"[^A-Za-z0-9._-]", line)[0]
        if name.lower() in found or "extra ==" in line:
            continue
        try:
            more = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # for another system or another Python
        found.add(name.lower())
        wanted += more
    return found


def link_distribution(name: str, packages: Path) -> None:
    """The packages of a distribution, where the environment looks for them."""
    source = distribution(name)
    tops = {Path(one).parts[0] for one in source.files or () if ".." not in Path(one).parts}
    for top in tops - {"__pycache__"}:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(source.locate_file(top))))


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        names = {one for one in file.namelist() if ".dist-info/" not in one}
    wanted = {
        str(Path("drystone") / path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert names == wanted
    assert {"drystone/py.typed", "drystone/service/page/static/index.html"} <= names
    assert {"drystone/describe/data/gpus.csv", "drystone/observe/reports/assets/page.js"} <= names


def test_the_metadata_says_which_pythons_and_extras(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        name = next(one for one in file.namelist() if one.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(file.read(name).decode())
    pythons = {
        one.rpartition(" ")[2]
        for one in told.get_all("Classifier")
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", one)
    }

    assert told["Requires-Python"] == ">=3.11"
    assert pythons == {"3.11", "3.12", "3.13"}
    assert set(told.get_all("Provides-Extra")) == EXTRAS


def test_nothing_of_the_repository_and_nothing_heavy_is_there(installed: Installed):
    code = (
        "import sys, drystone, importlib.util as u; from drystone.cli.main import run; "
        "run(['plan', 'gpt2-xl', '--gpus', '4xL4', '--json']); "
        "print(drystone.__file__, file=sys.stderr); "
        "heavy = ('torch', 'ray', 'matplotlib', 'highspy', 'transformers', 'psycopg'); "
        "print([one for one in heavy if u.find_spec(one)], file=sys.stderr)"
    )
    done = installed.run("python", "-c", code)

    where, heavy = done.stderr.splitlines()
    assert str(installed.bin.parent) in where
    assert heavy == "[]"


def test_the_commands_of_a_newcomer_work_outside_of_the_repository(installed: Installed):
    assert installed.answer("--version").startswith("drystone ")
    assert re.search(r"core +works", installed.answer("doctor"))
    assert re.search(r"training +missing", installed.answer("doctor"))
    assert "tokens/s" in installed.answer("plan", "llama-3-8b", "--gpus", "8xA100-80G,8xV100-32G")
    assert "llama-3-8b" in installed.answer(
        "estimate", "llama-3-8b", "--gpu", "A100-80G", "--layout", "dp=8,zero=3"
    )
    installed.answer("trace", "generate", "--jobs", "8", "--hours", "2", "--out", "jobs.csv")
    assert "8/8" in installed.answer(
        "simulate", "--trace", "jobs.csv", "--cluster", "cluster.yaml",
        "--policy", "prices,fifo", "--report", "out.html",
    )  # fmt: skip
    assert (installed.folder / "out.html").stat().st_size > 10_000
    assert "In theory" in installed.answer(
        "frontier", "--trace", "jobs.csv", "--market", "market.yaml", "--policy", "budget",
        "--budgets", "64",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("plan gpt2-xl --gpus 4xL4 --plot plans.png", "plots"),
        ("profile --quick", "runtime"),
        ("estimate module.py:build --gpu T4", "runtime"),
        ("simulate --trace eight.csv --cluster cluster.yaml --policy sia", "solver"),
        ("simulate --trace eight.csv --cluster cluster.yaml --policy gavel", "solver"),
        ("serve --engine ray --folder s", "ray"),
        ("serve --database postgresql+psycopg://127.0.0.1/none --folder s", "postgres"),
    ],
)
def test_a_missing_extra_is_named(installed: Installed, line: str, extra: str):
    (installed.folder / "module.py").write_text("def build():\n    return None\n")
    installed.answer("trace", "generate", "--jobs", "8", "--hours", "2", "--out", "eight.csv")
    done = installed.run("drystone", *line.split())

    assert done.returncode == 2, done.stderr
    assert f"pip install 'drystone[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_training_process_without_torch_says_what_is_missing(installed: Installed):
    done = installed.run("python", "-m", "drystone.run.train", "plan.json")

    assert done.returncode == 1
    assert done.stderr.strip() == (
        "error: training needs torch. Install it with: pip install 'drystone[runtime]'"
    )
