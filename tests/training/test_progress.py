"""What a person sees of a run."""

from aamoe_jax.training.progress import Progress

RECORD = {"step": 1, "loss": 1.0, "tokens_per_second": 10.0, "steps_per_second": 1.0, "data_wait": 0.0}


def test_dropped_pairs_are_told_and_nothing_is_told_of_none(capsys):
    with Progress(0, 2) as progress:
        progress.train(RECORD | {"layers": {"spent": [3.0, 4.0], "overflow": [0.0, 0.0125]}})
        progress.train(RECORD | {"step": 2, "layers": {"spent": [3.0, 4.0], "overflow": [0.0, 0.0]}})
    first, second = capsys.readouterr().out.splitlines()
    assert "3.50 resources/token  1.25% of a layer's pairs dropped at MeshConfig.pair_bound" in first
    assert "dropped" not in second
