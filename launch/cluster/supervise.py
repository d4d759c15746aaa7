"""Runs the attempts of a job, one after the other, by the table of exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from launch.cluster import exits
from launch.cluster.exits import Retry
from launch.cluster.job import Cluster, Job

PAUSE = 60.0
"""Seconds between attempts: what went wrong may need a moment to go right."""


class Ended(NamedTuple):
    """How an attempt ended."""

    code: int
    unhealthy: frozenset[str]
    """Names of what the next attempt must avoid."""


def execute(script: str) -> Ended:
    """Runs a bash script to its end, and passes on what it prints."""
    unhealthy = set()
    with subprocess.Popen(["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as shell:
        for line in shell.stdout or ():
            print(line, end="", flush=True)
            if found := re.match(r"unhealthy (\S+): ", line):
                unhealthy.add(found[1])
    code = shell.returncode
    return Ended(128 - code if code < 0 else code, frozenset(unhealthy))  # a signal, as shells count it


def supervise(cluster: Cluster, job: Job, pause: Callable[[float], None] = time.sleep) -> int:
    """Runs a job until it need not, or must not, be tried again.

    Returns:
      The exit code of its last attempt.
    """
    avoided: frozenset[str] = frozenset()
    retries = 0
    while True:
        ended = execute(cluster.run(job, sorted(avoided)))
        row = exits.lookup(ended.code)
        print(f"{job.name}: exit code {ended.code}, {row.meaning}; {row.retry.value}", file=sys.stderr, flush=True)
        if row.retry is Retry.NEVER or row.retry not in cluster.supervised:
            return ended.code
        if row.retry is Retry.ELSEWHERE and not ended.unhealthy:
            print(f"{job.name}: no node was named that could be avoided", file=sys.stderr)
            return ended.code
        if row.retry is not Retry.ALWAYS:
            retries += 1
        if retries > job.max_retries:
            print(f"{job.name}: tried again {job.max_retries} times (--max_retries)", file=sys.stderr)
            return ended.code
        avoided |= ended.unhealthy
        pause(PAUSE)
