"""Files are written, and what the axes hold is what the records said."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib import rcParams

from aamoe_jax.analysis.pictures import PAPER, budget_map, context_expert_share, lay_out, loss_curve, running_mean

PNG = b"\x89PNG\r\n\x1a\n"


def training_records(steps: int = 60) -> list[dict]:
    """A run on bytes whose loss falls, evaluated every 20 steps in records of their own."""
    falling = [2 + 6 / (1 + step) for step in range(steps)]
    records = [{"step": step, "bits_per_byte": bits, "loss": bits * np.log(2)} for step, bits in enumerate(falling)]
    return records + [{"step": step, "validation_bits_per_byte": 2.5} for step in range(0, steps, 20)]


def share_records(layers: int = 3) -> list[dict]:
    """Shares that move from experts to context."""
    records = []
    for step in (20, 0, 10):  # metrics of a resumed run need not be in order
        record = {"step": step}
        for measure in ("pairs", "mass"):
            record[f"{measure}_local"] = [0.5] * layers
            record[f"{measure}_context"] = [0.01 * step + 0.01 * layer for layer in range(layers)]
            record[f"{measure}_expert"] = [0.5 - 0.01 * step - 0.01 * layer for layer in range(layers)]
        records.append(record)
    return records


class TestLossCurve:
    def test_shows_training_and_validation(self, tmp_path):
        figure = loss_curve(training_records(), tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
        (axes,) = figure.axes
        raw, smooth, validation = axes.lines
        assert raw.get_ydata()[0] == 8.0
        assert len(smooth.get_ydata()) == 60
        np.testing.assert_array_equal(validation.get_xdata(), [0, 20, 40])
        assert validation.get_label() == "validation  2.500"
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "bits per byte")

    def test_the_first_fall_does_not_set_the_scale(self, tmp_path):
        low, high = loss_curve(training_records(), tmp_path / "loss.png").axes[0].get_ylim()
        assert low < 2.1
        assert high < 4.0

    def test_a_second_scale_only_where_it_is_true(self, tmp_path):
        (axes,) = loss_curve(training_records(), tmp_path / "loss.png").axes
        assert [child.get_ylabel() for child in axes.child_axes] == ["nats per token"]
        uneven = [record | {"loss": 1.0 + record["step"] % 2} for record in training_records() if "loss" in record]
        (axes,) = loss_curve(uneven, tmp_path / "loss.png").axes
        assert not axes.child_axes

    def test_without_validation_or_loss(self, tmp_path):
        figure = loss_curve([{"step": 0, "bits_per_byte": 8.0}], tmp_path / "loss.png")
        assert len(figure.axes[0].lines) == 2

    def test_refuses_records_that_hold_no_loss(self, tmp_path):
        with pytest.raises(ValueError, match="none of 1 records has 'bits_per_byte'"):
            loss_curve([{"step": 0}], tmp_path / "loss.png")


def test_running_mean_shortens_its_reach_at_the_ends():
    np.testing.assert_allclose(running_mean(np.array([0.0, 3.0, 6.0, 9.0]), 1), [1.5, 3.0, 6.0, 7.5])
    np.testing.assert_allclose(running_mean(np.array([4.0]), 3), [4.0])


class TestLayout:
    def test_line_feeds_end_a_row_and_long_rows_wrap(self):
        assert lay_out(["ab", "\n", "c", "de"], 2) == [
            (0, 0, "a", 0),
            (0, 1, "b", 0),
            (1, 0, "↵", 1),
            (2, 0, "c", 2),
            (2, 1, "d", 3),
            (3, 0, "e", 3),
        ]

    def test_what_cannot_be_printed_shows_as_a_mark(self):
        assert [cell[2] for cell in lay_out([" \t\x00é"], 8)] == [" ", "→", "·", "é"]

    def test_an_empty_passage_is_refused(self):
        with pytest.raises(ValueError, match="without a character"):
            lay_out([""], 8)


class TestBudgetMap:
    TOKENS = ("de", "f", " ", "f", "\n", "x$y$")

    def draw(self, path, **options):
        """A passage of six tokens in two layers."""
        spent = np.array([[0, 2, 4, 6, 8, 10], [0, 0, 0, 0, 0, 40]])
        return budget_map(self.TOKENS, spent, path, columns=10, **options)

    def test_one_panel_for_the_mean_and_one_per_layer_asked_for(self, tmp_path):
        figure = self.draw(tmp_path / "map.png", layers=(1,))
        assert (tmp_path / "map.png").read_bytes().startswith(PNG)
        mean, layer, bar = figure.axes
        assert mean.get_title(loc="left") == "mean over layers: 5.83 resources per token"
        assert layer.get_title(loc="left") == "layer 1: 6.67 resources per token"
        assert bar.get_ylabel() == "resources"
        assert mean.images[0].norm is layer.images[0].norm

    def test_every_character_stands_on_what_its_token_was_given(self, tmp_path):
        mean, _ = self.draw(tmp_path / "map.png").axes
        ground = mean.images[0].get_array()
        np.testing.assert_array_equal(ground[0, :6].filled(-1), [0, 0, 1, 2, 3, 4])
        np.testing.assert_array_equal(ground[1, :4].filled(-1), [25, 25, 25, 25])
        assert ground.mask[0, 6:].all()
        assert [text.get_text() for text in mean.texts] == list("deff↵x$y$")

    def test_nothing_spent_and_no_token_look_different(self, tmp_path):
        mean, _ = self.draw(tmp_path / "map.png").axes
        image = mean.images[0]
        assert tuple(image.cmap(image.norm(0))[:3]) == (1.0, 1.0, 1.0)
        assert PAPER != "#FFFFFF"

    def test_letters_are_light_on_dark_ground(self, tmp_path):
        mean, _ = self.draw(tmp_path / "map.png").axes
        assert mean.texts[0].get_color() == "#1A1A1A"
        assert mean.texts[-1].get_color() == "#FFFFFF"

    def test_refuses_text_and_numbers_of_different_length(self, tmp_path):
        with pytest.raises(ValueError, match="2 tokens of text, but 3 of spent resources"):
            budget_map(["a", "b"], np.zeros((1, 3), int), tmp_path / "map.png")


class TestContextExpertShare:
    def test_one_line_per_layer_in_order_of_step(self, tmp_path):
        figure = context_expert_share(share_records(), tmp_path / "share.png")
        assert (tmp_path / "share.png").read_bytes().startswith(PNG)
        assert len(figure.axes) == 6
        context = figure.axes[1]
        assert context.get_title(loc="left") == "routed context"
        assert len(context.lines) == 3
        np.testing.assert_array_equal(context.lines[2].get_xdata(), [0, 10, 20])
        np.testing.assert_allclose(context.lines[2].get_ydata(), [0.02, 0.12, 0.22])

    def test_a_deep_stack_names_a_dozen_layers(self, tmp_path):
        figure = context_expert_share(share_records(layers=40), tmp_path / "share.png")
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert len(figure.axes[0].lines) == 40
        assert len(labels) == 12
        assert (labels[0], labels[-1]) == ("layer 0", "layer 39")

    def test_refuses_records_of_a_model_without_resources(self, tmp_path):
        with pytest.raises(ValueError, match="'pairs_local'"):
            context_expert_share(training_records(), tmp_path / "share.png")


def test_no_style_leaks_out(tmp_path):
    before = dict(rcParams)
    loss_curve(training_records(), tmp_path / "loss.png")
    assert dict(rcParams) == before
