"""Write the lock anew and print what changed: `make lock`.

uv resolves for every Python and system at once, which pip cannot. It is installed into a folder
that is thrown away, so it is not a dependency of the project.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent / "pyproject.toml"
UV = "uv==0.13.8"
CORE_EXTRAS = ("plots", "runtime")
# An editable install without a build environment of its own needs the build back end beside it.
BUILD = ("hatchling", "editables")
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)")


def main() -> None:
    """Compile each file of the lock, and compare it with what stood there."""
    before = {path.name: pinned_versions(path) for path in sorted(HERE.glob("*.txt"))}
    with tempfile.TemporaryDirectory() as folder:
        uv = install_uv(Path(folder))
        sources = Path(folder)
        (sources / "torch.in").write_text(torch_requirement() + "\n")
        compile_lock(uv, "torch.txt", [sources / "torch.in"], hashes=False)
        # torch is installed apart (README.md beside this file); below it everything is in the lock.
        (sources / "no-torch.txt").write_text("torch ; python_version < '3'\n")
        (sources / "below-torch.in").write_text("\n".join((*names_below_torch(), *BUILD)) + "\n")
        shared = ["--override", str(sources / "no-torch.txt"), "--constraint", "torch.txt"]
        inputs = [PROJECT, sources / "below-torch.in"]
        core = [flag for extra in CORE_EXTRAS for flag in ("--extra", extra)]
        compile_lock(uv, "dev.txt", inputs, *shared, *core, "--extra", "dev")
        compile_lock(uv, "core.txt", inputs, *shared, *core, "--constraint", "dev.txt")
    for path in sorted(HERE.glob("*.txt")):
        print_changes(path.name, before.get(path.name, {}), pinned_versions(path))


def install_uv(folder: Path) -> Path:
    """uv, in an environment of its own."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", UV], check=True)
    return folder / "env" / "bin" / "uv"


def compile_lock(uv: Path, name: str, inputs: list[Path], *flags: str, hashes: bool = True) -> None:
    """One file of the lock, from nothing, so that every version is the newest allowed."""
    oldest = tomllib.loads(PROJECT.read_text())["project"]["requires-python"].removeprefix(">=")
    command = [
        str(uv), "pip", "compile", *map(str, inputs), *flags,
        "--universal", "--python-version", oldest, "--upgrade", "--quiet",
        "--no-header", "--no-annotate",
        "--no-emit-package", "torch", "--output-file", name,
    ]  # fmt: skip
    if hashes:
        command.append("--generate-hashes")
    subprocess.run(command, cwd=HERE, check=True)


def torch_requirement() -> str:
    """The exact torch that the runtime is tested with."""
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    return next(line for line in extras["runtime"] if line.startswith("torch=="))


def names_below_torch() -> list[str]:
    """What every build of torch needs; drivers and CUDA come only with the build that uses them."""
    for_cuda = re.compile(r"^(nvidia|cuda|triton)")
    return [name for name in pinned_versions(HERE / "torch.txt") if not for_cuda.match(name)]


def pinned_versions(path: Path) -> dict[str, str]:
    """Versions by name; several of one name, for different Pythons, are joined."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if match := PINNED.match(line):
            found.setdefault(match[1], []).append(match[2])
    return {name: " or ".join(versions) for name, versions in found.items()}


def print_changes(name: str, old: dict[str, str], new: dict[str, str]) -> None:
    """A line for each package whose version changed."""
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    print(f"{name}: {len(new)} packages, {len(changed)} changed")
    for key in changed:
        print(f"  {key}: {old.get(key, 'absent')} -> {new.get(key, 'removed')}")


if __name__ == "__main__":
    sys.exit(main())
