"""Files are written, and what the axes hold is what the records said."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib import rcParams

from aamoe_jax.analysis.pictures import (
    PAPER,
    budget_map,
    context_expert_share,
    fitted_scale,
    lay_out,
    loss_curves,
    run_styles,
    running_mean,
)

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


class TestLossCurves:
    def draw(self, path, *records: list[dict], **options):
        """Runs called a, b, ..."""
        return loss_curves(dict(zip("abcdefgh", records, strict=False)), path / "loss.png", **options)

    def test_shows_the_loss_raw_and_smoothed_and_validation(self, tmp_path):
        figure = self.draw(tmp_path, training_records(), smooth=3)
        assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
        (axes,) = figure.axes
        raw, smooth, validation = axes.lines
        assert raw.get_ydata()[0] == 8.0
        assert raw.get_alpha() < 0.5
        assert smooth.get_ydata()[1] == pytest.approx((8.0 + 5.0 + 4.0) / 3)
        np.testing.assert_array_equal(validation.get_xdata(), [0, 20, 40])
        assert validation.get_label() == "validation  2.500"
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "bits per byte")
        assert axes.get_title(loc="left") == "line: mean over 3 steps; faint: as recorded; dots: validation"

    def test_runs_are_told_apart_and_smoothed_alike(self, tmp_path):
        losses = [[one | {"bits_per_byte": 2.0 + run} for one in training_records()] for run in range(3)]
        (axes,) = self.draw(tmp_path, losses[0][:30], *losses[1:]).axes
        assert "mean over 6 steps" in axes.get_title(loc="left")  # a tenth of the longest
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels == ["a  2.000", "b  3.000, validation 2.500", "c  4.000, validation 2.500"]
        named = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert len({line.get_color() for line in named}) == 3
        low, high = axes.get_ylim()
        assert low < 2.0 < 4.0 < high

    def test_every_run_has_a_style_of_its_own(self):
        styles = run_styles(21)
        assert len(set(styles)) == 21
        assert len({colour for colour, _ in styles[:7]}) == 7
        assert {dashes for _, dashes in styles[:7]} == {"-"}

    def test_the_first_fall_does_not_set_the_scale(self, tmp_path):
        low, high = self.draw(tmp_path, training_records(), smooth=1).axes[0].get_ylim()
        assert low < 2.1
        assert high < 4.0

    def test_a_second_scale_only_where_it_is_true(self, tmp_path):
        (axes,) = self.draw(tmp_path, training_records(), training_records()).axes
        assert [child.get_ylabel() for child in axes.child_axes] == ["nats per token"]
        uneven = [record | {"loss": 1.0 + record["step"] % 2} for record in training_records() if "loss" in record]
        for records in ([uneven], [training_records(), uneven]):
            (axes,) = self.draw(tmp_path, *records).axes
            assert not axes.child_axes

    def test_without_validation_or_loss(self, tmp_path):
        (axes,) = self.draw(tmp_path, [{"step": 0, "bits_per_byte": 8.0}]).axes
        assert len(axes.lines) == 2
        assert axes.get_title(loc="left") == "line: mean over 1 steps; faint: as recorded"

    def test_refuses_records_that_hold_no_loss(self, tmp_path):
        with pytest.raises(ValueError, match="none of 1 records has 'bits_per_byte'"):
            self.draw(tmp_path, [{"step": 0}])


def test_running_mean_counts_steps_and_takes_what_is_there_at_the_ends():
    np.testing.assert_allclose(running_mean(np.arange(4), np.array([0.0, 3.0, 6.0, 9.0]), 2), [0.0, 1.5, 4.5, 7.5])
    np.testing.assert_allclose(running_mean(np.array([0, 10, 40]), np.array([0.0, 4.0, 9.0]), 20), [0.0, 2.0, 9.0])
    np.testing.assert_allclose(running_mean(np.array([7]), np.array([4.0]), 3), [4.0])


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

    def test_words_are_broken_only_where_no_row_holds_them(self):
        def rows(*text: str) -> list[str]:
            found: dict[int, str] = {}
            for row, _, character, _ in lay_out(text, 5):
                found[row] = found.get(row, "") + character
            return list(found.values())

        assert rows("a", "b c", "def gh") == ["ab ", "cdef ", "gh"]
        assert rows("ab abcdefgh i") == ["ab ab", "cdefg", "h i"]
        assert rows("abcde fgh") == ["abcde", " fgh"]

    def test_what_cannot_be_printed_shows_as_a_mark(self):
        assert [cell[2] for cell in lay_out([" \t\x00é"], 8)] == [" ", "→", "·", "é"]

    def test_an_empty_passage_is_refused(self):
        with pytest.raises(ValueError, match="without a character"):
            lay_out([""], 8)


class TestBudgetMap:
    TOKENS = ("de", "f", " ", "f", "\n", "x$y$")

    def draw(self, path, **options):
        """A passage of six tokens in two layers, of which the second stands higher in the stack."""
        spent = np.array([[0, 2, 4, 6, 8, 10], [0, 0, 0, 0, 0, 40]])
        return budget_map(self.TOKENS, spent, path / "map.png", layers=(0, 3), columns=10, **options)

    def test_one_panel_for_the_mean_and_one_per_layer(self, tmp_path):
        figure = self.draw(tmp_path)
        assert (tmp_path / "map.png").read_bytes().startswith(PNG)
        mean, first, second, bar = figure.axes
        assert mean.get_title(loc="left") == "mean over layers: 5.83 resources per token"
        assert first.get_title(loc="left") == "layer 0: 5.00 resources per token"
        assert second.get_title(loc="left") == "layer 3: 6.67 resources per token"
        assert bar.get_ylabel() == "resources of a token"
        assert mean.images[0].norm is second.images[0].norm

    def test_a_deep_stack_has_six_panels_of_layers(self, tmp_path):
        figure = budget_map(["a"], np.ones((40, 1), int), tmp_path / "map.png", layers=range(2, 42), columns=10)
        titles = [axes.get_title(loc="left") for axes in figure.axes[:-1]]
        assert [title.split(":")[0] for title in titles[1:]] == [f"layer {n}" for n in (2, 10, 18, 25, 33, 41)]

    def test_every_character_stands_on_what_its_token_was_given(self, tmp_path):
        mean, *_ = self.draw(tmp_path).axes
        ground = mean.images[0].get_array()
        np.testing.assert_array_equal(ground[0, :6].filled(-1), [0, 0, 1, 2, 3, 4])
        np.testing.assert_array_equal(ground[1, :4].filled(-1), [25, 25, 25, 25])
        assert ground.mask[0, 6:].all()
        assert [text.get_text() for text in mean.texts] == list("deff↵x$y$")

    def test_parts_stand_beside_their_rows_with_their_means(self, tmp_path):
        mean, first, *_ = self.draw(tmp_path, parts={"prose": 5, "code": 1}).axes
        assert [label.get_text() for label in mean.get_yticklabels()] == ["prose\n2.00", "code\n25.00"]
        assert [label.get_text() for label in first.get_yticklabels()] == ["prose\n4.00", "code\n10.00"]
        assert mean.get_yticks().tolist() == [0, 1]

    def test_the_bar_says_what_each_tone_stands_for(self, tmp_path):
        *_, bar = self.draw(tmp_path).axes
        labels = [label.get_text() for label in bar.get_yticklabels()]
        assert labels == ["0", "1–3", "4–5", "6–7", "8–9", "10–39", "40"]

    def test_letters_are_light_on_dark_ground(self, tmp_path):
        mean, *_ = self.draw(tmp_path).axes
        assert mean.texts[0].get_color() == "#1A1A1A"
        assert mean.texts[-1].get_color() == "#FFFFFF"

    def test_refuses_text_and_numbers_of_different_length(self, tmp_path):
        with pytest.raises(ValueError, match="2 tokens of text, but 3 of spent resources"):
            budget_map(["a", "b"], np.zeros((1, 3), int), tmp_path / "map.png", layers=(0,))


class TestFittedScale:
    def test_tones_are_about_equally_frequent_and_grow_darker(self):
        spent = np.random.default_rng(0).geometric(0.05, size=(4, 500))
        colours, norm = fitted_scale(spent)
        counts = np.bincount(norm(spent).ravel(), minlength=colours.N)
        assert colours.N == 8
        assert counts.max() < 1.7 * spent.size / 8
        luminance = np.array([colours(tone)[:3] for tone in range(8)]) @ (0.2126, 0.7152, 0.0722)
        assert (np.diff(luminance) < 0).all()

    def test_white_is_for_nothing_alone(self):
        white = (1.0, 1.0, 1.0, 1.0)
        colours, norm = fitted_scale(np.array([[0, 3, 3, 9]]))
        assert [colours(norm(count)) == white for count in (0, 0.25, 3, 9)] == [True, False, False, False]
        colours, norm = fitted_scale(np.array([[3, 4]]))
        assert white not in [colours(norm(count)) for count in (3, 4)]
        assert PAPER != "#FFFFFF"

    def test_few_counts_have_a_tone_each(self):
        assert fitted_scale(np.array([[2, 3, 3, 3, 3, 6]]))[1].boundaries.tolist() == [2, 3, 6, 7]
        assert fitted_scale(np.full((2, 5), 4))[1].boundaries.tolist() == [4, 5]
        assert fitted_scale(np.zeros((2, 5), int))[1].boundaries.tolist() == [0, 1]


class TestContextExpertShare:
    def test_one_line_per_layer_in_order_of_step(self, tmp_path):
        figure = context_expert_share(share_records(), tmp_path / "share.png", layers=(1, 3, 5))
        assert (tmp_path / "share.png").read_bytes().startswith(PNG)
        assert len(figure.axes) == 6
        context = figure.axes[1]
        assert context.get_title(loc="left") == "routed context"
        assert len(context.lines) == 3
        np.testing.assert_array_equal(context.lines[2].get_xdata(), [0, 10, 20])
        np.testing.assert_allclose(context.lines[2].get_ydata(), [0.02, 0.12, 0.22])

    def test_a_deep_stack_names_a_dozen_layers(self, tmp_path):
        figure = context_expert_share(share_records(layers=40), tmp_path / "share.png", layers=range(40))
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert len(figure.axes[0].lines) == 40
        assert len(labels) == 12
        assert (labels[0], labels[-1]) == ("layer 0", "layer 39")

    def test_refuses_records_of_a_model_without_resources(self, tmp_path):
        with pytest.raises(ValueError, match="'pairs_local'"):
            context_expert_share(training_records(), tmp_path / "share.png", layers=())


def test_no_style_leaks_out(tmp_path):
    before = dict(rcParams)
    loss_curves({"a": training_records()}, tmp_path / "loss.png")
    assert dict(rcParams) == before
