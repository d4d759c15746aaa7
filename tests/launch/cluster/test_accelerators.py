"""Slices by name."""

from __future__ import annotations

import pytest

from aamoe_jax.config import ConfigError
from launch.cluster import accelerators
from launch.cluster.accelerators import parse


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips", "hosts", "devices_per_host"),
    [
        ("v4-8", "2x2x1", 4, 1, 4),
        ("v5p-8", "2x2x1", 4, 1, 4),
        ("v5p-1024", "8x8x8", 512, 128, 4),
        ("v5p-12288", "16x16x24", 6144, 1536, 4),
        ("v5litepod-1", "1x1", 1, 1, 1),
        ("v5litepod-8", "2x4", 8, 1, 8),
        ("v5litepod-16", "4x4", 16, 4, 4),
        ("v5litepod-256", "16x16", 256, 64, 4),
        ("v6e-256", "16x16", 256, 64, 4),
        ("tpu7x-128", "4x4x4", 64, 16, 8),
    ],
)
def test_a_slice(accelerator, topology, chips, hosts, devices_per_host):
    found = parse(accelerator)
    assert (found.topology, found.chips, found.hosts, found.devices_per_host) == (
        topology,
        chips,
        hosts,
        devices_per_host,
    )


def test_every_usual_shape_is_one_and_names_itself():
    names = accelerators.known()
    assert len(names) == len(set(names)) > 40
    for name in names:
        found = parse(name)
        assert parse(name, found.topology) == found
        assert found.hosts * found.chips_per_host == found.chips <= found.generation.most


def test_other_shapes_are_cubes():
    assert parse("v5p-384", "4x4x12").hosts == 48
    assert parse("tpu7x-18432", "16x24x24").chips == 9216


@pytest.mark.parametrize(
    ("accelerator", "topology", "message"),
    [
        ("v5e-256", None, "did you mean 'v5litepod-256'?"),
        ("v5p_1024", None, "did you mean 'v5p-1024'?"),
        ("v5p-1023", None, "did you mean 'v5p-512' or 'v5p-1024'?"),
        ("v5p-100", None, "did you mean 'v5p-64' or 'v5p-128'?"),
        ("v5e-100", None, "did you mean 'v5litepod-64' or 'v5litepod-128'?"),
        ("v4-99999", None, "did you mean 'v4-8192'?"),
        ("v4-1", None, "did you mean 'v4-8'?"),
        ("v5pp-128", None, "there are v4, v5litepod, v5p, v6e, tpu7x"),
        ("v5p-\u0661\u0662\u0668", None, "is unknown"),
        ("v5p-" + "9" * 5000, None, "is unknown"),
        ("v5p-8", "2x2x" + "9" * 5000, "has 3 dimensions"),
        ("v5p-384", None, "give --topology too"),
        ("h100-8", None, "there are v4, v5litepod, v5p, v6e, tpu7x"),
        ("v5p-1024", "8x8x4", "has 256 chips, but v5p-1024 has 512; name v5p-512"),
        ("v5p-1024", "16x32", "has 3 dimensions"),
        ("v5p-1024", "8x8xeight", "has 3 dimensions"),
        ("v5p-384", "12x4x4", "does not come in it"),
        ("v5p-96", "4x4x3", "does not come in it"),
        ("v5litepod-32", "2x16", "does not come in it"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(accelerator, topology, message):
    with pytest.raises(ConfigError) as refusal:
        parse(accelerator, topology)
    assert message in str(refusal.value)
    assert repr(topology or accelerator) in str(refusal.value)
