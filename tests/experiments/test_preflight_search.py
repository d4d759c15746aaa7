"""The configs at scale are what their committed searches found, and as big as their names say."""

from __future__ import annotations

import dataclasses
import json

import pytest

from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.summary import Summary
from experiments.binding import load_experiment
from experiments.preflight_search import RESULTS, SPACES, Candidate, candidates, ranked, report
from tests.experiments.test_configs import num_parameters
from tests.preflight.samples import REFUSED, SUMMARY

ONE, OTHER = Candidate((1, 64, 1, 1), "full", 64), Candidate((4, 16, 1, 1), "dots", 64)


@pytest.mark.parametrize(("gin_file", "billions"), [("aamoe_1b.gin", 1), ("aamoe_8b.gin", 8), ("aamoe_100b.gin", 100)])
def test_a_config_has_the_parameters_of_its_name(gin_file, billions):
    assert num_parameters(gin_file) == pytest.approx(billions * 1e9, rel=0.05)


@pytest.mark.parametrize("gin_file", SPACES)
def test_a_config_is_the_best_of_its_search(gin_file):
    found = json.loads((RESULTS / f"preflight_search_{gin_file.removesuffix('.gin')}.json").read_text())
    best, summary = ranked(
        [
            (Candidate(tuple(one["mesh"]), one["remat"], one["rows"]), Summary.from_json(json.dumps(one["summary"])))
            for one in found
        ]
    )[0]
    assert summary.fits
    assert load_experiment([gin_file], best.params) == load_experiment([gin_file])


@pytest.mark.parametrize("gin_file", SPACES)
def test_every_candidate_makes_its_slice(gin_file):
    space = SPACES[gin_file]
    chips = Slice.parse(space.topology).chips
    tried = list(candidates(space, chips))
    assert len(tried) > 1
    for candidate in tried:
        mesh = load_experiment([gin_file], candidate.params).mesh
        assert (mesh.data, candidate.mesh[0] * mesh.fsdp * mesh.resource * mesh.tensor) == (-1, chips)


def test_the_fastest_that_fits_comes_first():
    slow = dataclasses.replace(SUMMARY, moved_bytes=2 * SUMMARY.moved_bytes)
    found = [(OTHER, REFUSED), (ONE, slow), (OTHER, SUMMARY)]
    assert [summary for _, summary in ranked(found)] == [SUMMARY, slow, REFUSED]
    rows = report("aamoe_1b.gin", found).splitlines()[-3:]
    assert [row.split("|")[1].strip() for row in rows] == ["dots", "full", "dots"]
