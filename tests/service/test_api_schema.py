"""Generated requests, every check of Schemathesis: no failure, no 5xx; with tokens and without.

A few examples here; DRYSTONE_API_EXAMPLES=50 runs all phases with so many for each request.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from services import serving

pytest.importorskip("schemathesis")
pytestmark = pytest.mark.slow

NUM_EXAMPLES = int(os.environ.get("DRYSTONE_API_EXAMPLES", "0"))
# 422 is also for what a schema cannot say: the text of a job file, or that two keys contradict.
# Waiting for events is what `wait` is for; here nobody has the time.
CONFIG = """
[parameters]
"query.wait" = 0.05

[checks]
max_response_time = 60
positive_data_acceptance.expected-statuses = ["2xx", "401", "403", "404", "409", "422"]
"""


@pytest.mark.parametrize("who", ["admin", "submitter", "without a token", "while there are none"])
def test_every_request_is_answered_as_described(tmp_path, who):
    with serving(tmp_path / "s") as service:
        token, team = "", ""
        if who != "while there are none":
            team = "red"
            service.team(team)
            token = service.token("submitter" if who == "submitter" else "admin", team)
        service.submit(team)
        # It is made when it is first asked for, and `st` waits ten seconds, however busy all is.
        assert service.ask("GET", "/openapi.json").status == 200
        (tmp_path / "schemathesis.toml").write_text(CONFIG)
        command = shutil.which("st", path=str(Path(sys.executable).parent))
        assert command is not None
        phases = "examples,coverage,fuzzing,stateful" if NUM_EXAMPLES else "examples,fuzzing"
        done = subprocess.run(
            [command, "--config-file", str(tmp_path / "schemathesis.toml"), "run",
             f"{service.url}/openapi.json", "--exclude-path", "/v1/stream", "--checks", "all",
             "--max-examples", str(NUM_EXAMPLES or 1), "--phases", phases, "--seed", "7",
             "--generation-database", "none", "--request-timeout", "60", "--no-color",
             *(["-H", f"Authorization: Bearer {token}"] if token and "without" not in who else [])],
            capture_output=True, text=True, check=False, cwd=tmp_path, timeout=3000,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert "passed" in done.stdout
