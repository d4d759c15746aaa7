"""What docs/libraries.md says of the second version of Orbax's interface is so in the version that is installed."""

from __future__ import annotations

from pathlib import Path

from benchmarks import orbax_v1


def test_it_keeps_and_loads_what_it_should_and_does_not_notice_a_flipped_bit(tmp_path):
    good = tmp_path / "run"
    assert orbax_v1.save(good) == [20, 30, 40]
    assert orbax_v1.load(good) == "equal bits"
    assert set(orbax_v1.flips(good, 3)) == {"other numbers, no error"}
    assert orbax_v1.damaged(good, Path("40/commit_success.txt"), Path.unlink) == "equal bits"
    assert orbax_v1.damaged(good, Path("40/params/manifest.ocdbt"), Path.unlink).startswith("NoEntryError")


def test_it_loads_safetensors_and_does_not_save_them(tmp_path):
    loaded, saved = orbax_v1.safetensors_results(tmp_path / "safetensors")
    assert loaded == "works"
    assert "not supported" in saved
