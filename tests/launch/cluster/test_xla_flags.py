"""Which flags of the TPU compiler a job is started with."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from aamoe_jax.config import ConfigError
from launch.cluster import accelerators, xla_flags
from tests.launch.cluster.cases import CLUSTERS, JOB

TPUS = ("tpu_vm", "gke", "xpk")
PAGE = Path(__file__).parents[3] / "docs" / "pods.md"


def test_a_chip_gets_its_own_and_slices_get_more():
    names = {
        generation: re.findall(r"--(\w+)=", xla_flags.by_chip(generation, 1)) for generation in accelerators.GENERATIONS
    }
    assert [generation for generation, of in names.items() if "xla_tpu_scoped_vmem_limit_kib" in of] == ["v6e"]
    assert [generation for generation, of in names.items() if "xla_tpu_megacore_fusion_allow_ags" in of] == ["v5p"]
    for generation, of in names.items():
        more = re.findall(r"--(\w+)=", xla_flags.by_chip(generation, 2))
        assert set(more) - set(of) == {row.name for row in xla_flags.TABLE if row.several}


@pytest.mark.parametrize("kind", TPUS)
def test_they_are_of_the_job_and_can_be_turned_off_or_chosen(kind):
    """And not of the probe, which says whether a host is fit."""
    cluster = CLUSTERS[kind]
    flags = xla_flags.by_chip(cluster.accelerator.partition("-")[0], 1)
    assert cluster.run(JOB, ()).count(flags) == 1
    assert "LIBTPU_INIT_ARGS" not in cluster.health(JOB)
    assert "LIBTPU_INIT_ARGS" not in dataclasses.replace(cluster, xla_flags="none").run(JOB, ())
    own = dataclasses.replace(cluster, xla_flags="--xla_a=1 --xla_b=2").run(JOB, ())
    assert own.count("--xla_a=1 --xla_b=2") == 1
    assert flags not in own
    with pytest.raises(ConfigError, match=r"--xla_flags = 'by_chp': must be by_chip, none, or flags that "):
        dataclasses.replace(cluster, xla_flags="by_chp")


def test_slices_of_a_job_count():
    two = dataclasses.replace(CLUSTERS["gke"], slices=2)
    assert xla_flags.environment(two) == {"LIBTPU_INIT_ARGS": xla_flags.by_chip("v5litepod", 2)}


def test_gke_sets_the_variable_of_the_container():
    pod = CLUSTERS["gke"].manifest(JOB, ())["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (probe,), (main,) = pod["initContainers"], pod["containers"]
    (found,) = [each["value"] for each in main["env"] if each["name"] == "LIBTPU_INIT_ARGS"]
    assert found == xla_flags.by_chip("v5litepod", 1)
    assert "LIBTPU_INIT_ARGS" not in {each["name"] for each in probe["env"]}


def test_the_page_has_the_table():
    rows = [
        f"| `{row.name}={row.value}` | "
        f"{'several slices' if row.several else 'all' if len(row.chips) > 1 else row.chips[0]} | "
        f"{row.does} | {row.source} |"
        for row in xla_flags.TABLE
    ]
    assert [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `xla_")] == rows


def test_env_becomes_the_program():
    """A signal to the process reaches Python."""
    script = CLUSTERS["xpk"].run(JOB, ())
    (command,) = [line for line in script.splitlines() if "--command=" in line]
    (word,) = shlex.split(command.strip().rstrip("\\"))
    assert " && exec env LIBTPU_INIT_ARGS=" in word.replace("'LIBTPU", "LIBTPU")
