"""One table of exit codes: the programs end with its codes, and every launcher does what it says."""

from __future__ import annotations

import re
import signal

import pytest

from aamoe_jax.training import distributed
from launch import train
from launch.cluster import exits, gke, probe, xpk
from launch.cluster.exits import TABLE, Retry
from tests.launch.cluster.cases import CLUSTERS, JOB


def test_codes_are_given_once():
    assert len({row.code for row in TABLE}) == len(TABLE)


def test_the_programs_end_with_codes_of_the_table():
    assert exits.lookup(train.EXIT_DIVERGED).retry is Retry.NEVER
    assert exits.lookup(train.EXIT_NOT_SAVED).retry is Retry.LIMITED
    assert exits.lookup(train.EXIT_SIGNAL + signal.SIGTERM).retry is Retry.ALWAYS
    assert exits.lookup(train.EXIT_SIGNAL + signal.SIGINT).retry is Retry.NEVER
    assert exits.lookup(distributed.EXIT_LOST).retry is Retry.LIMITED
    assert distributed.EXIT_LOST == exits.LOST
    assert exits.lookup(probe.UNHEALTHY).retry is Retry.ELSEWHERE
    assert exits.lookup(1).retry is Retry.NEVER


def test_an_unknown_code_is_tried_again_a_few_times():
    assert exits.lookup(77).retry is Retry.LIMITED


def kubernetes_does(code: int) -> str:
    """What Kubernetes and JobSet do after a container ended with a code, by the policies of the manifest.

    Rules are tried in order. A Job that no rule failed fails by its backoffLimit of 0.
    """
    manifest = CLUSTERS["gke"].manifest(JOB, ())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        if code in rule.get("onExitCodes", {}).get("values", []):
            reason = "PodFailurePolicy"
            message = f"Container main for pod default/mine-0 failed with exit code {code} matching {rule['action']} "
            message += f"rule at index {index}"
            break
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [])
        if reason in rule.get("onJobFailureReasons", [reason]) and (
            not patterns or any(re.search(pattern, message) for pattern in patterns)
        ):
            return rule["action"]
    return "RestartJobSet"


ACTIONS = {
    Retry.NEVER: "FailJobSet",
    Retry.ELSEWHERE: "FailJobSet",  # and then the supervisor, which knows where
    Retry.ALWAYS: "RestartJobSetAndIgnoreMaxRestarts",
    Retry.LIMITED: "RestartJobSet",
}


@pytest.mark.parametrize("row", [row for row in TABLE if row.code], ids=lambda row: str(row.code))
def test_kubernetes_does_what_the_table_says(row):
    assert kubernetes_does(row.code) == ACTIONS[row.retry]


def test_kubernetes_tries_unknown_codes_again():
    assert kubernetes_does(77) == "RestartJobSet"


def test_a_pod_whose_node_goes_is_a_preemption():
    disruption = len(gke.POD_RULES) - 1
    assert gke.POD_RULES[disruption]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    message = f"Pod default/mine-0 has condition DisruptionTarget matching FailJob rule at index {disruption}"
    (rule,) = [rule for rule in gke.JOBSET_RULES if rule["name"] == "preempted"]
    assert re.search(rule["onJobFailureMessagePatterns"][0], message)


def test_xpk_restarts_what_is_tried_again_and_nothing_else_that_it_can_help():
    (flag,) = re.findall(r"--restart-on-exit-codes=(\S+)", CLUSTERS["xpk"].run(JOB, ()))
    restarted = {int(code) for code in flag.split(",")} | set(xpk.OWN_RESTARTS)
    wanted = set(exits.codes(Retry.LIMITED, Retry.ALWAYS))
    assert wanted <= restarted
    # Codes of signals are restarted by xpk itself: a job that a person stops there is deleted.
    assert set(exits.codes(Retry.NEVER, Retry.ELSEWHERE)) & restarted == {exits.STOPPED}
