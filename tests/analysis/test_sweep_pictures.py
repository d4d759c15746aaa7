"""Pictures of sweeps: files are written, and what the axes hold is what the records said."""

from __future__ import annotations

import numpy as np
import pytest

from aamoe_jax.analysis.sweep_pictures import budget_sweep, by_octave, length_sweep

PNG = b"\x89PNG\r\n\x1a\n"


def budget_points() -> list[dict]:
    """Three budget scales; half of what is spent goes to experts."""
    shares = {"pairs_local": [0.25, 0.25], "pairs_context": [0.25, 0.25], "pairs_expert": [0.5, 0.5]}
    return [
        {"budget_scale": scale, "bits_per_byte": 3 - scale, "statistics": {"spent": [4 * scale, 2 * scale]} | shares}
        for scale in (0.5, 1.0, 2.0)
    ]


def length_points(*fixed: str) -> list[dict]:
    """Three lengths, the last one skipped."""

    def figures(length: int) -> dict:
        return {"bits_per_byte": 2 + length / 100, "nll_by_position": [None, *np.linspace(3, 2, length - 1)]}

    return [
        {
            "factor": factor,
            "length": 32.0 * factor,
            "skipped": None,
            "fixed": dict.fromkeys(fixed, figures(int(32 * factor))),
        }
        for factor in (1.0, 4.0)
    ] + [{"factor": 8.0, "length": 256.0, "skipped": "too little text", "fixed": {}}]


def test_the_dial_against_bits_and_what_is_spent(tmp_path):
    figure = budget_sweep(budget_points(), tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(PNG)
    bits, spent = figure.axes
    np.testing.assert_array_equal(bits.lines[0].get_xdata(), [0.5, 1.0, 2.0])
    np.testing.assert_array_equal(bits.lines[0].get_ydata(), [2.5, 2.0, 1.0])
    assert [label.get_text() for label in bits.get_xticklabels()] == ["1/2", "1", "2"]
    heights = np.array([[bar.get_height() for bar in bars] for bars in spent.containers])
    np.testing.assert_allclose(heights.sum(0), [1.5, 3.0, 6.0])  # means over the two layers
    np.testing.assert_allclose(heights[2], [0.75, 1.5, 3.0])


def test_length_against_bits_and_loss_by_position(tmp_path):
    figure = length_sweep(length_points("beta", "B"), tmp_path / "length.png")
    assert (tmp_path / "length.png").read_bytes().startswith(PNG)
    bits, beta, total = figure.axes
    np.testing.assert_array_equal(bits.lines[0].get_xdata(), [32, 128])
    assert (beta.get_title("left"), total.get_title("left")) == (
        "Loss by position, β fixed",
        "Loss by position, B fixed",
    )
    assert [line.get_label() for line in beta.lines] == ["32", "128"]


def test_a_model_without_budgets_has_one_curve(tmp_path):
    assert len(length_sweep(length_points("none"), tmp_path / "length.png").axes) == 2


def test_nothing_but_skipped_lengths_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match="every length was skipped"):
        length_sweep(length_points("beta")[2:], tmp_path / "length.png")


def test_bins_widen_by_half_an_octave_and_pass_over_what_has_no_target():
    nll = np.arange(64.0)
    nll[0] = np.nan
    centre, mean = by_octave(nll)
    np.testing.assert_array_equal(centre, [8, 19.5, 27.5, 38.5, 54.5])
    np.testing.assert_array_equal(mean, [8, 19, 27, 38, 54])
    for length in (1, 5, 16, 17, 4096):
        assert by_octave(np.ones(length))[1].tolist() == [1.0] * len(by_octave(np.ones(length))[0])
    assert len(by_octave(np.full(8, np.nan))[0]) == 0
