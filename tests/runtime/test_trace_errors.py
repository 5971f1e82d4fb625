"""What the user is told when a module cannot be traced, through the real process."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from drystone.describe.recipe import Optimizer, StepKernel
from drystone.errors import RequestError
from drystone.estimate.module.trace import TraceRequest
from drystone.estimate.module.tracer import trace_module

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def a_request(path: Path, **changes) -> TraceRequest:
    return TraceRequest(path=str(path), function="build", micro_batch=1, seq_len=128, **changes)


MISTAKES = {
    "raises": ("def build():\n    x = 1\n    raise KeyError('lost')\n", "KeyError: 'lost'", ":3"),
    "returns a number": ("def build():\n    return 3\n", "returned int, not a torch.nn.Module", ""),
    "has no such function": ("def other():\n    pass\n", "no function 'build'.*other", ""),
    "does not compile": ("def build(:\n", "SyntaxError", ":1"),
    "exits": ("raise SystemExit(4)\n", "SystemExit", ":1"),
    "takes what nobody guesses": (
        "import torch\nclass Odd(torch.nn.Module):\n"
        "    def forward(self, sound, light):\n        return sound\n"
        "def build():\n    return Odd()\n",
        "cannot tell what Odd.forward.*example_batch", "",
    ),
    "fails in forward": (
        "import torch\nclass Odd(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return x @ torch.zeros(3, 5)\n"
        "def build():\n    return torch.nn.Sequential(Odd(4, 4))\n",
        "RuntimeError|shape", ":4",
    ),
    "branches on values": (
        "import torch\nclass Odd(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x) if x.sum() > 0 else x\n"
        "def build():\n    return Odd(4, 4)\n",
        "depends on the values", ":4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_users_file_is_named_with_its_line(mistake: str, tmp_path: Path):
    text, message, line = MISTAKES[mistake]
    path = tmp_path / "mine.py"
    path.write_text(text)

    with pytest.raises(RequestError, match=message) as caught:
        trace_module(a_request(path), cache_folder=tmp_path / "cache")
    assert caught.value.where == f"{path}{line}"
    assert caught.value.exit_code == 2


def test_a_function_that_never_returns_is_stopped(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("def build():\n    while True:\n        pass\n")

    with pytest.raises(RequestError, match="not traced within 2 s"):
        trace_module(a_request(path), timeout_seconds=2, cache_folder=tmp_path / "cache")


def test_what_the_users_file_prints_and_imports_does_no_harm(tmp_path: Path):
    """A neighbour is imported, and changing it makes the cached trace stale."""
    (tmp_path / "neighbour.py").write_text("SIZE = 8\n")
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom neighbour import SIZE\nprint('hello')\n"
        "def build():\n    print('building')\n    return torch.nn.Linear(SIZE, SIZE)\n"
    )
    request = a_request(path, optimizer=Optimizer.SGD, step_kernel=StepKernel.LOOP)

    assert trace_module(request, cache_folder=tmp_path / "cache").num_params == 72
    (tmp_path / "neighbour.py").write_text("SIZE = 16\n")
    assert trace_module(request, cache_folder=tmp_path / "cache").num_params == 272
    assert "neighbour" not in sys.modules
