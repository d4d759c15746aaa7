"""What a person sees of a run."""

import re
import threading
import time

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from aamoe_jax.training import distributed, progress
from aamoe_jax.training.progress import Progress, compiling

RECORD = {"step": 1, "loss": 1.0, "tokens_per_second": 10.0, "steps_per_second": 1.0, "data_wait": 0.0}


def test_dropped_pairs_are_told_and_nothing_is_told_of_none(capsys):
    with Progress(0, 2) as bar:
        bar.train(RECORD | {"layers": {"spent": [3.0, 4.0], "overflow": [0.0, 0.0125]}})
        bar.train(RECORD | {"step": 2, "layers": {"spent": [3.0, 4.0], "overflow": [0.0, 0.0]}})
    first, second = capsys.readouterr().out.splitlines()
    assert "3.50 resources/token  1.25% of a layer's pairs dropped at MeshConfig.pair_bound" in first
    assert "dropped" not in second


class TestCompiling:
    def test_a_long_one_says_so_and_a_quick_one_does_not(self, capsys, monkeypatch):
        monkeypatch.setattr(progress, "STILL_SECONDS", 0.1)
        with compiling("the step"):
            time.sleep(0.35)
        *still, last = capsys.readouterr().out.splitlines()
        assert still[:2] == ["compiling the step: 0 s so far"] * 2
        assert re.fullmatch(r"compiled the step in 0\.[3-9] s", last)
        with compiling("the step"):
            pass
        assert capsys.readouterr().out == ""
        with compiling("the step", even_if_quick=True):
            pass
        assert capsys.readouterr().out == "compiled the step in 0.0 s\n"

    def test_the_cache_is_told_of(self, capsys, tmp_path):
        """The second time JAX reads what it wrote."""
        names = {
            "jax_compilation_cache_dir": str(tmp_path),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": 0,
        }
        kept = {name: getattr(jax.config, name) for name in names}
        compilation_cache.reset_cache()
        try:
            for name, value in names.items():
                jax.config.update(name, value)
            for _ in range(2):
                jax.clear_caches()
                with compiling("a sum", even_if_quick=True):
                    jax.jit(lambda x: x.sum() + 3).lower(jax.numpy.ones(7)).compile()
        finally:
            for name, value in kept.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
        first, second = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"compiled a sum in \d\.\d s", first)
        assert re.fullmatch(r"compiled a sum in \d\.\d s, from the cache", second)

    def test_an_error_ends_it_and_other_processes_are_silent(self, capsys, monkeypatch):
        before = threading.active_count()
        with pytest.raises(KeyError), compiling("the step", even_if_quick=True):
            raise KeyError
        assert threading.active_count() == before
        monkeypatch.setattr(distributed, "is_first", lambda: False)
        monkeypatch.setattr(progress, "STILL_SECONDS", 0.05)
        with compiling("the step", even_if_quick=True):
            time.sleep(0.12)
        assert capsys.readouterr().out == ""
