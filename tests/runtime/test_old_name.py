"""`drystone.run.runtime`, the old name of `drystone.run.train`, which users' scripts have."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def test_the_command_starts_under_its_old_name():
    done = subprocess.run(
        [sys.executable, "-m", "drystone.run.runtime", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "--checkpoint-every" in done.stdout


def test_what_is_imported_under_the_old_name_is_the_same():
    from drystone.run.runtime.api import Trainer as OldTrainer

    from drystone.run.train.api import Trainer

    assert OldTrainer is Trainer
