"""Trains, evaluates or generates on a cluster: TPU VMs, GKE, xpk or SLURM.

    aamoe cluster --cluster=tpu_vm --project=my-project --zone=us-east5-a --accelerator=v5p-128 \\
      --name=mine run -- launch.train --gin_file=aamoe.gin --run_dir=/mnt/shared/runs/mine

    run      probes every host, runs the program to its end, and tries again by the table of launch/cluster/exits.py
    health   probes every host and starts nothing
    logs     follows what the first process prints
    status   shows how the job and its hosts are
    stop     stops the job, saved, and gives back what was taken for it

All take --name and the settings of the cluster; `run` and `health` also the program and its flags, after `--`:
launch.train, launch.evaluate, launch.choose, launch.generate or launch.inspect. Where a job has several processes
--distributed=auto is added. --dry_run prints the bash script that would be run, and nothing else. Before `run` asks for
hosts it reads the program's flags, gin files and mesh on this machine.

Exit code: that of the job, by the table; 1 also where the launch was refused, 10 where a command of it failed.
"""

from __future__ import annotations

import difflib
import sys

from absl import flags

from aamoe_jax.config import ConfigError
from launch import program
from launch.cluster import check, exits, settings
from launch.cluster.job import FOLDER_FLAGS, Job, check_name
from launch.cluster.supervise import execute, supervise

PROGRAM_ACTIONS = ("run", "health")
NAME_ACTIONS = ("logs", "status", "stop")


def define_flags() -> None:
    """The flags of this program: every setting of every kind of cluster, once."""
    flags.DEFINE_enum("cluster", None, list(settings.CLUSTERS), "Kind of cluster.", required=True)
    flags.DEFINE_bool("dry_run", False, "Print the script that would be run, and nothing else.")
    settings.define_flags()
    flags.FLAGS.set_gnu_getopt(True)  # flags may stand behind the action; after -- they are the program's


def main(argv: list[str]) -> int:
    action, words = _action(argv[1:])
    settings.refuse_others(flags.FLAGS.cluster)
    cluster = settings.from_flags(settings.CLUSTERS[flags.FLAGS.cluster])
    if action in PROGRAM_ACTIONS:
        job = _job(words)
        script = cluster.run(job, ()) if action == "run" else cluster.health(job)
        if action == "run":
            check.check(job, cluster.devices, cluster.slices)
    else:
        by_name = {"logs": cluster.logs, "status": cluster.status, "stop": cluster.stop}
        script = by_name[action](check_name(flags.FLAGS.name))
    if flags.FLAGS.dry_run:
        print(script, end="")
        return 0
    try:
        return supervise(cluster, job) if action == "run" else execute(script).code
    except KeyboardInterrupt:
        print("interrupted; what was started goes on, and `stop` stops it", file=sys.stderr)
        return exits.STOPPED


def _action(words: list[str]) -> tuple[str, list[str]]:
    """The action, and the words behind it."""
    actions = (*PROGRAM_ACTIONS, *NAME_ACTIONS)
    if not words:
        raise ConfigError(f"what to do is missing: one of {', '.join(actions)}")
    action, *rest = words
    if action not in actions:
        close = difflib.get_close_matches(action, actions, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{action!r}: must be one of {', '.join(actions)}{hint}")
    if rest and action in NAME_ACTIONS:
        raise ConfigError(f"{rest[0]!r}: {action} takes no program, only --name and the settings of the cluster")
    return action, rest


def _job(words: list[str]) -> Job:
    if not words:
        raise ConfigError(f"the program is missing: end with -- {' or -- '.join(FOLDER_FLAGS)}, and its flags")
    return settings.from_flags(Job, program=words[0], arguments=tuple(words[1:]))


if __name__ == "__main__":
    define_flags()
    program.run(main)
