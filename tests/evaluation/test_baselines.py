"""The baselines against numbers found by hand."""

from __future__ import annotations

import lzma
import math
import random

import pytest

from aamoe_jax.evaluation.baselines import unigram_bits_per_byte, xz_bits_per_byte


class TestUnigram:
    def test_one_more_than_was_seen(self):
        # p(a) = (3 + 1) / (4 + 256), p(b) = (1 + 1) / 260, p(c) = 1 / 260
        expected = -(math.log2(4 / 260) + math.log2(2 / 260) + 2 * math.log2(1 / 260)) / 4
        assert unigram_bits_per_byte(b"aaab", b"abcc") == pytest.approx(expected)

    def test_nothing_learnt_costs_eight_bits(self):
        assert unigram_bits_per_byte(b"", b"any text") == pytest.approx(8.0)
        assert unigram_bits_per_byte(bytes(range(256)) * 3, b"any text") == pytest.approx(8.0)

    def test_no_frequencies_of_another_text_do_better(self):
        text = b"the quick brown fox jumps over the lazy dog" * 20
        assert unigram_bits_per_byte(text, text) < unigram_bits_per_byte(b"zzz", text)

    def test_order_does_not_matter(self):
        assert unigram_bits_per_byte(b"hello", b"world") == unigram_bits_per_byte(b"olleh", b"dlrow")


class TestXz:
    def test_is_the_length_of_the_stream(self):
        text = b"to be or not to be, " * 50
        stream = lzma.compress(text, preset=9)
        assert lzma.decompress(stream) == text
        assert xz_bits_per_byte(text) == 8 * len(stream) / 1000

    def test_noise_costs_eight_bits_and_the_container(self):
        noise = random.Random(0).randbytes(100_000)
        assert 8.0 <= xz_bits_per_byte(noise) < 8.02

    def test_repetition_costs_next_to_nothing(self):
        assert xz_bits_per_byte(b"a" * 100_000) < 0.02


@pytest.mark.parametrize("measure", [xz_bits_per_byte, lambda text: unigram_bits_per_byte(b"a", text)])
def test_an_empty_text_is_refused(measure):
    with pytest.raises(ValueError, match="empty"):
        measure(b"")
