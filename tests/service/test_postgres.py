"""The same system with its log in a real PostgreSQL server."""

import pytest
from systems import running

pytestmark = pytest.mark.slow


def test_jobs_run_and_controllers_follow_each_other_on_postgresql(postgres, tmp_path):
    folder, database = tmp_path / "s", postgres()
    with running(folder, database=database) as first:
        jobs = [first.submit(steps=60), first.submit(fault="kill")]
        first.wait_step(jobs[0], 5)
        first.controller.engine.quit = lambda: None  # as if killed
    with running(folder, database=database) as second:
        assert second.wait_over(*jobs) == ["done", "done"]
        assert second.controller.find(jobs[0]).num_starts == 1
        assert [row.state for row in second.controller.store.list_jobs()] == ["done", "done"]
        assert second.controller.journal.lease.epoch == 2
