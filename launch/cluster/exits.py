"""What a job's exit code means, and what to do about it: the one table that every launcher follows.

`launch.train` and `launch.cluster.probe` end with these codes; Kubernetes' failure policies, xpk's restart list, the
batch script of SLURM and the supervisor are all made from the table.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Retry(enum.Enum):
    """What follows an exit code."""

    NEVER = "is not tried again"
    LIMITED = "is tried again, at most --max_retries times"
    ALWAYS = "is tried again, always"
    ELSEWHERE = "is tried again on other nodes, at most --max_retries times"


class Exit(NamedTuple):
    """One row of the table."""

    code: int
    meaning: str
    retry: Retry


UNHEALTHY = 6
LOST = 5
STOPPED = 130
PREEMPTED = 143

TABLE = (
    Exit(UNHEALTHY, "a host failed its health probe", Retry.ELSEWHERE),
    Exit(1, "the config, the data, the memory or a checkpoint does not fit", Retry.NEVER),
    Exit(3, "the loss is not finite", Retry.NEVER),
    Exit(STOPPED, "stopped by a person", Retry.NEVER),
    Exit(4, "a checkpoint could not be read or written, or a metric not written", Retry.LIMITED),
    Exit(7, "another run uses the run folder", Retry.LIMITED),
    Exit(8, "a step gave different bits when it was computed again", Retry.LIMITED),
    Exit(70, "an unexpected error; its traceback is in the log", Retry.LIMITED),
    Exit(137, "killed, most often for want of memory", Retry.LIMITED),
    Exit(134, "aborted by a library", Retry.LIMITED),
    Exit(139, "segmentation fault", Retry.LIMITED),
    Exit(PREEMPTED, "preempted", Retry.ALWAYS),
    Exit(LOST, "a process of the job was lost, or a step hung", Retry.LIMITED),
    Exit(0, "finished", Retry.NEVER),
)
"""By precedence: where the hosts of a job ended with different codes, the job's is the first of these. A cause comes
before what it does to the other hosts, and any failure before success."""

UNLAUNCHED = Exit(10, "the launch failed, not the job", Retry.NEVER)
"""Of the script of a launcher, which names the command that failed and its exit code. No job ends with it."""


def lookup(code: int) -> Exit:
    """The row of a code. One that is not in the table is tried again a few times: it may be the cluster's own."""
    return next(
        (row for row in (*TABLE, UNLAUNCHED) if row.code == code), Exit(code, "not in the table", Retry.LIMITED)
    )


def codes(*retries: Retry) -> list[int]:
    """The codes that are followed by any of these, ascending. Success is not a failure to be retried or not."""
    return sorted(row.code for row in TABLE if row.retry in retries and row.code)
