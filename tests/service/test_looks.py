"""Bursts of jobs whose code must be run to know what they ask for, and long lists of jobs."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from services import serving, until

from drystone.cli.quick import list_jobs
from drystone.run.control.options import OptionBook
from drystone.service import jobs
from drystone.service.looks import MAX_AT_ONCE_OF_CALLER, MAX_OF_CALLER

BURST = 50  # more than the framework has threads


class SlowLooks:
    """Looks that end when they are told to; how many there were at once."""

    def __init__(self, monkeypatch) -> None:
        self.may_end, self.num_now, self.peak, self.owners = threading.Event(), 0, 0, Counter()
        self._lock, look = threading.Lock(), OptionBook.looked_at

        def slow(book, job):
            if ".py:" not in job.model:
                return look(book, job)
            with self._lock:
                self.num_now += 1
                self.peak = max(self.peak, self.num_now)
                self.owners[job.name] += 1
            assert self.may_end.wait(60)
            with self._lock:
                self.num_now -= 1
            return replace(job, model="mini-gpt")

        monkeypatch.setattr(OptionBook, "looked_at", slow)


@pytest.mark.parametrize("path", ["/v1/plan", "/v1/jobs"])
def test_a_burst_of_slow_modules_leaves_threads_for_everybody_else(tmp_path, monkeypatch, path):
    looks = SlowLooks(monkeypatch)
    (tmp_path / "mine.py").write_text("def build(): ...\n")
    statuses: list[int] = []

    def body(name: str, model: str = "mine.py:build") -> dict:
        train = {"steps": 3, "batch": 4, "sequence": 16}
        return {"job": {"name": name, "model": model, "train": train}, "folder": str(tmp_path)}

    with serving(tmp_path / "s") as service, ThreadPoolExecutor(BURST + 1) as threads:
        alice, bob = service.token("admin", name="alice"), service.token("admin", name="bob")

        def send(name: str, token: str) -> None:
            statuses.append(service.ask("POST", path, body(name), token=token).status)

        try:
            burst = [threads.submit(send, "alice", alice) for _ in range(BURST)]
            until(lambda: statuses.count(429) == BURST - MAX_OF_CALLER)
            # Others are read to, have jobs of theirs taken in, and have their modules looked at.
            assert service.ask("GET", "/v1/jobs", token=bob).status == 200
            assert service.ask("POST", path, body("b", "mini-gpt"), token=bob).status in (200, 201)
            burst.append(threads.submit(send, "bob", bob))
            until(lambda: looks.owners["bob"])
            assert looks.owners == {"alice": MAX_AT_ONCE_OF_CALLER, "bob": 1}
            assert len(statuses) == BURST - MAX_OF_CALLER
        finally:
            looks.may_end.set()
        for sent in burst:
            sent.result()
        done = 200 if path == "/v1/plan" else 201
        assert Counter(statuses) == {429: BURST - MAX_OF_CALLER, done: MAX_OF_CALLER + 1}
        assert looks.owners == {"alice": MAX_OF_CALLER, "bob": 1}  # each was looked at once
        assert looks.peak <= MAX_AT_ONCE_OF_CALLER + 1


def test_a_page_of_jobs_is_bounded_and_the_command_asks_for_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "PAGE_ROWS", 2)
    with serving(tmp_path) as service:
        ids = [service.submit() for _ in range(5)]
        page = service.ask("GET", "/v1/jobs?most=100000").json()
        assert ([job["id"] for job in page["jobs"]], page["next_skip"]) == (ids[:2], 2)
        with service.client() as client:
            found = {limit: list_jobs(client, [], "", limit) for limit in (3, 100)}
        assert [job["id"] for job in found[3]["jobs"]] == ids[:3]
        assert [job["id"] for job in found[100]["jobs"]] == ids
        assert found[100]["total"] == 5
