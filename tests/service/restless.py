"""A policy that moves the first job to other GPUs every few seconds, for tests of resizes."""

from drystone.schedule.decision import Resize, Start

CYCLE = ((2, 0), (1, 0), (0, 2))  # (A100, T4)
SECONDS = 15.0  # the next ranks are up by then, mostly


def restless(snapshot, memory):
    """The same at the same time, whichever controller asks: it remembers nothing."""
    if not len(snapshot.jobs):
        return [], memory
    wanted = CYCLE[int(snapshot.now_seconds / SECONDS) % len(CYCLE)]
    sets = snapshot.options.counts[snapshot.jobs.option_set[0]]
    now = int(snapshot.jobs.option[0])
    option = next(
        (
            row
            for row, speed in enumerate(snapshot.job_speeds[0])
            if tuple(sets[row]) == wanted and speed > 0
        ),
        now,
    )
    if now == option:
        return [], memory
    kind = Start if now < 0 else Resize
    placement = tuple((node, count) for node, count in enumerate(wanted) if count)
    job_id = snapshot.jobs.specs[0].id
    return [kind(job_id=job_id, option=option, placement=placement, reason="restless")], memory
