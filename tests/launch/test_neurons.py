"""`python -m launch.neurons` as people call it (PM-10, PM-11), on a model that was never trained."""

import json

import numpy as np
import pytest

from aamoe_jax.training.metrics import FILE
from tests.launch import session
from tests.launch.helpers import save_run
from tests.training.helpers import experiment, model_config, tiny_data

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """Outcomes of all calls, and what they wrote."""
    folder = tmp_path_factory.mktemp("neurons")
    data = tiny_data(folder / "data")
    save_run(folder / "dense", experiment(data, model_config("attention+feed_forward", num_kv_heads=1)))
    save_run(folder / "experts", experiment(data, model_config("aamoe", num_layers=1)))
    save_run(folder / "depths", experiment(data, model_config("random_qk+mixture_of_depths", num_layers=1)))
    layers = {"spent": [3.0], "pairs_local": [0.5], "pairs_context": [0.25], "pairs_expert": [0.25]}
    line = json.dumps({"kind": "train", "step": 8, "layers": layers})
    (folder / "experts" / FILE).write_text(line + "\n")
    calls = {
        "networks": ("dense",),
        "experts": ("experts", "--messages=1"),
        "depths": ("depths",),
        "filter": ("dense", "--thresholds=0,0.9,50", "--max_batches=1"),
        "clusters": ("dense", "--clusters=4", "--clusters_kept=1,4", "--max_batches=1"),
        "nothing to thin": ("experts", "--thresholds=1"),
        "words": ("dense", "--thresholds=much"),
        "none": ("dense", "--clusters_kept=0"),
        "too many": ("dense", "--clusters=4", "--clusters_kept=5"),
        "both": ("dense", "--clusters_kept=1", "--thresholds=1"),
    }
    arguments = [
        [f"--checkpoint={folder / run}", f"--output={folder / name}.json", *rest]
        for name, (run, *rest) in calls.items()
    ]
    outcomes = dict(zip(calls, session.calls("neurons", arguments), strict=True))
    paths = {name: folder / f"{name}.json" for name in calls}
    return outcomes, {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def test_networks_of_every_layer_are_told(called):
    outcomes, written = called
    assert outcomes["networks"].code == 0, outcomes["networks"].stderr
    found = written["networks"]
    assert [(net["layer"], net["network"]) for net in found["networks"]] == [
        (0, "heads"), (0, "feed_forward"), (1, "heads"), (1, "feed_forward"),
    ]  # fmt: skip
    heads, units = found["networks"][:2]
    assert (heads["side_by_side"], heads["neurons"], heads["numerical"]) == (2, 0, [16, 16])
    assert (units["side_by_side"], units["neurons"], len(units["likely"])) == (1, 32, 3)
    sizes = {"learned": 64, "per_token": 4, "per_token_distinct": 2, "crossover": 16}
    assert found["sizes"].items() >= sizes.items()
    assert "heads have more neurons than were learned after 16 tokens" in outcomes["networks"].stdout
    (heads, experts) = written["experts"]["networks"]
    assert (experts["network"], experts["side_by_side"], experts["neurons"]) == ("experts", 2, 32)
    assert written["experts"]["active"] == {"local": [12.0], "context": [6.0], "expert": [6.0]}
    assert "that a token met, local: 12.0\n" in outcomes["experts"].stdout
    assert written["networks"]["active"] == {}


def test_what_cannot_be_read_has_a_row_that_says_so(called):
    outcomes, written = called
    assert outcomes["depths"].code == 0, outcomes["depths"].stderr
    unread, *read = written["depths"]["networks"]
    assert unread == {"layer": 0, "mixer": "random_qk", "network": None}
    assert [(net["mixer"], net["network"]) for net in read] == [
        ("mixture_of_depths", "heads"), ("mixture_of_depths", "feed_forward"),
    ]  # fmt: skip
    assert "    0  random_qk           cannot be read as neurons\n" in outcomes["depths"].stdout
    assert written["depths"]["sizes"].items() >= {"learned": 32, "per_token": 2}.items()


def test_pm_10_what_a_filter_keeps_and_costs(called):
    outcomes, written = called
    assert outcomes["filter"].code == 0, outcomes["filter"].stderr
    all_of_it, some, nothing = written["filter"]["sweep"]
    assert (all_of_it["threshold"], all_of_it["kept"]) == (0, 1)
    assert all_of_it["above"] == pytest.approx(0, abs=1e-6)
    assert 0 < some["kept"] < 1
    assert abs(some["above"]) > 1e-4
    assert nothing["kept"] == 0
    np.testing.assert_allclose([nothing["above"] - some["above"]], [nothing["nats"] - some["nats"]])
    assert outcomes["filter"].stdout.splitlines()[0].split() == ["threshold", "kept", "nats", "above"]


def test_pm_11_what_routing_to_clusters_keeps_and_costs(called):
    outcomes, written = called
    assert outcomes["clusters"].code == 0, outcomes["clusters"].stderr
    one, every = written["clusters"]["sweep"]
    assert (every["kept"], every["recall"]) == (1, pytest.approx(1, abs=1e-5))
    assert every["above"] == pytest.approx(0, abs=1e-6)
    assert 0 < one["kept"] < 0.6
    assert one["kept"] < one["recall"] < 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing to thin", "ModelConfig.pattern = ('aamoe',): no layer has 'attention', which is what is thinned"),
        ("words", "--thresholds=much: must be numbers such as 0,0.5,1"),
        ("none", "--clusters_kept=0: must be numbers such as 1,4,16"),
        ("too many", "ClusteredAttentionConfig.clusters_kept = 5: must be at most clusters = 4"),
        ("both", "give --thresholds or --clusters_kept, one at a time"),
    ],
)
def test_what_cannot_be_done_is_one_line(called, name, message):
    assert called[0][name].code == 1
    assert called[0][name].stderr == f"error: {message}\n"
