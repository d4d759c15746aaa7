"""Checkpoints on disk: complete or absent, intact or refused."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from aamoe_jax.config import DataConfig, ExperimentConfig, to_dict
from aamoe_jax.training import checkpoints
from aamoe_jax.training.checkpoints import (
    CheckpointError,
    CheckpointStore,
    CorruptCheckpointError,
    SaveError,
    Snapshot,
    UnreadableCheckpointError,
    _digest,
    find_checkpoint,
    fingerprints,
    load_checkpoint,
    read_meta,
    saved_steps,
)
from aamoe_jax.training.local_tier import LocalTier
from aamoe_jax.training.metrics import FILE
from aamoe_jax.training.optimizer import build_optimizer
from aamoe_jax.training.resume import changed_fields, refuse_lost_history, refuse_other_experiment, restore_newest
from aamoe_jax.training.state import TrainState
from tests.training.helpers import assert_same_bits, experiment, replace

CONFIG = experiment(DataConfig(seq_len=64, document_align=8))
NO_LOCAL = LocalTier(None, Path())
DATASETS = {"code": {"corpus_digest": "abc", "tokenizer_digest": "byt5"}}


def state_at(step: int, size: int = 100) -> TrainState:
    """A small state, other at every step."""
    keys = jax.random.split(jax.random.key(step), 3)
    params = {"embedding": jax.random.normal(keys[0], (size, 30)), "periods": {"norm": {"scale": jnp.full(4, step)}}}
    optimizer = build_optimizer(CONFIG.optimizer, 10).init(params)
    optimizer = jax.tree.map(lambda leaf: leaf + step, optimizer)
    return TrainState(
        jnp.asarray(step, jnp.int32), params, optimizer, keys[1], 1e-8 * 1.2 ** jnp.arange(step, step + 2.0)
    )


def store_in(folder: Path, keep_last: int = 2) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep_last=keep_last)


def saved(folder: Path, losses: dict[int, float | None], keep_last: int = 2) -> Path:
    """The folder of a run with checkpoints of these steps and validation losses."""
    with store_in(folder, keep_last) as store:
        for step, loss in losses.items():
            store.save(Snapshot(state_at(step), CONFIG, DATASETS, loss))
    return folder


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes: writes fail as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failure(store: CheckpointStore, state: TrainState, loss: float | None = None) -> SaveError:
    """The error that saving raises, at once or at a later call."""
    try:
        store.save(Snapshot(state, CONFIG, DATASETS, loss))
        store.wait()
    except SaveError as error:
        return error
    raise AssertionError("the checkpoint was saved")


class TestRoundTrip:
    def test_every_bit_of_the_state(self, tmp_path):
        saved(tmp_path, {3: None})
        with store_in(tmp_path) as store:
            restored, _ = restore_newest(store, NO_LOCAL, state_at(0), CONFIG, DATASETS)
        assert_same_bits(restored._replace(key=None), state_at(3)._replace(key=None))
        assert_same_bits(jax.random.key_data(restored.key), jax.random.key_data(state_at(3).key))

    def test_by_path_alone(self, tmp_path):
        saved(tmp_path, {3: 2.0, 6: 3.0})
        for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "6"):
            checkpoint = load_checkpoint(path)
            assert checkpoint.step == 6
            assert checkpoint.config == CONFIG
            assert_same_bits(checkpoint.params, state_at(6).params)
        assert load_checkpoint(tmp_path, "best").step == 3
        assert checkpoint.metadata["datasets"] == DATASETS
        assert checkpoint.metadata["data"] == {"next_step": 6}
        assert "jax" in checkpoint.metadata["versions"]

    def test_the_state_may_be_donated_at_once(self, tmp_path):
        advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state._replace(key=None)), donate_argnums=0)
        state = state_at(5)
        with store_in(tmp_path) as store:
            store.save(Snapshot(state, CONFIG, DATASETS))
            for _ in range(3):
                state = advance(state)
        assert_same_bits(load_checkpoint(tmp_path).params, state_at(5).params)


class TestWhatIsKept:
    def test_the_newest_and_the_best(self, tmp_path):
        saved(tmp_path, {1: 5.0, 2: 1.0, 3: 4.0, 4: None, 5: 3.0})
        with store_in(tmp_path) as store:
            assert store.steps() == [2, 4, 5]

    def test_the_best_of_before_counts_after_a_restart(self, tmp_path):
        saved(tmp_path, {1: 1.0, 2: 2.0}, keep_last=1)
        saved(tmp_path, {3: 3.0}, keep_last=1)
        assert find_checkpoint(tmp_path, "best").name == "1"
        assert find_checkpoint(tmp_path).name == "3"

    def test_superseded_ones_go_when_the_new_one_is_complete(self, tmp_path):
        saved(tmp_path, {1: None}, keep_last=1)
        with store_in(tmp_path, keep_last=1) as store:
            store.save(Snapshot(state_at(2), CONFIG, DATASETS))
            assert 1 in store.steps() or 2 in store.steps()
            store.wait()
            assert store.steps() == [2]

    def test_unfinished_ones_are_not_seen_and_are_removed(self, tmp_path):
        saved(tmp_path, {1: None})
        unfinished = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
        shutil.copytree(tmp_path / "checkpoints" / "1", unfinished)
        assert find_checkpoint(tmp_path).name == "1"
        with store_in(tmp_path):
            assert not unfinished.exists()


class TestFullDisk:
    def test_earlier_ones_stay_and_nothing_half_written_does(self, tmp_path):
        saved(tmp_path, {1: 2.0})
        before = sorted(tmp_path.rglob("*"))
        with store_in(tmp_path) as store, full_disk(4096):
            message = str(failure(store, state_at(2, size=1000), loss=1.0))
        assert "the checkpoint of step 2 could not be written" in message
        assert "the newest complete one is of step 1" in message
        assert "\n" not in message
        assert sorted(tmp_path.rglob("*")) == before
        assert_same_bits(load_checkpoint(tmp_path, "best").params, state_at(1).params)

    def test_a_later_save_succeeds_when_there_is_room_again(self, tmp_path):
        store = store_in(tmp_path)
        with full_disk(4096):
            assert "there is no earlier one" in str(failure(store, state_at(2, size=1000)))
        store.save(Snapshot(state_at(3), CONFIG, DATASETS))
        store.close()
        assert store.steps() == [3]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two checkpoints; tests damage copies."""
    return saved(tmp_path_factory.mktemp("run"), {1: None, 2: None})


class TestDamage:
    @pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
    def test_no_file_can_be_damaged_unnoticed(self, run, tmp_path, how):
        newest = Path("checkpoints") / "2"
        noticed = 0
        for path in sorted(run.joinpath(newest).rglob("*")):
            if not path.is_file():
                continue
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run / newest, copy / newest)
            damage(copy / newest / path.relative_to(run / newest), how)
            try:
                params = load_checkpoint(copy).params
            except CorruptCheckpointError:
                noticed += 1
            else:
                # A file of Orbax's own bookkeeping, which loading does not need.
                assert_same_bits(params, state_at(2).params)
        assert noticed >= 3

    @pytest.mark.parametrize("item", ["params", "optimizer"])
    def test_a_flipped_bit_in_an_array_is_noticed_on_resume(self, run, tmp_path, item, capsys):
        copy = tmp_path / "run"
        shutil.copytree(run, copy)
        files = [path for path in (copy / "checkpoints" / "2" / item).rglob("*") if path.is_file()]
        damage(max(files, key=lambda path: path.stat().st_size), "flip")
        with store_in(copy) as store:
            state, _ = restore_newest(store, NO_LOCAL, state_at(0), CONFIG, DATASETS)
            assert int(state.step) == 1
            assert store.steps() == [1]
            store.save(Snapshot(state_at(2), CONFIG, DATASETS))  # the step can be saved again
        assert "2.corrupt" in capsys.readouterr().err
        assert_same_bits(load_checkpoint(copy).params, state_at(2).params)

    def test_all_of_them(self, run, tmp_path):
        copy = tmp_path / "run"
        shutil.copytree(run, copy)
        for step in (1, 2):
            (copy / "checkpoints" / str(step) / "meta" / "metadata").unlink()
        for _ in range(2):  # nothing is moved, so that the second try says the same
            with store_in(copy) as store, pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
                restore_newest(store, NO_LOCAL, state_at(0), CONFIG, DATASETS)
        assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["1", "2"]

    def test_a_newer_format_says_to_update(self, run, tmp_path):
        copy = tmp_path / "run"
        shutil.copytree(run, copy)
        path = copy / "checkpoints" / "2" / "meta" / "metadata"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
        with pytest.raises(
            CheckpointError, match="has checkpoint format 2, this version reads up to 1: update"
        ) as caught:
            load_checkpoint(copy)
        assert not isinstance(caught.value, CorruptCheckpointError)

    def test_altered_metadata(self, run, tmp_path):
        copy = tmp_path / "run"
        shutil.copytree(run, copy)
        path = copy / "checkpoints" / "2" / "meta" / "metadata"
        path.write_text(path.read_text().replace('"batch_size": 4', '"batch_size": 5'))
        with pytest.raises(CorruptCheckpointError, match="its metadata was altered"):
            load_checkpoint(copy)

    def test_nothing_there(self, tmp_path):
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(CheckpointError, match="there is no checkpoint in"):
                load_checkpoint(path)

    def test_no_best_without_an_evaluation(self, run):
        with pytest.raises(CheckpointError, match="none is the best"):
            load_checkpoint(run, "best")


def failing(monkeypatch, owner: type, name: str, error: Exception, times: int, where: str = "") -> None:
    """Makes the first `times` calls of a method fail whose first argument ends with `where`."""
    monkeypatch.setattr(checkpoints, "RETRY_AFTER", (0.0, 0.0))
    works, left = getattr(owner, name), [times]

    def call(self, *args, **kwargs):
        if left[0] and str(self).endswith(where):
            left[0] -= 1
            raise error
        return works(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, call)


class TestFailedReads:
    """Memory and storage that fail say nothing about a checkpoint."""

    def test_of_arrays_are_tried_again(self, run, monkeypatch):
        failing(monkeypatch, ocp.Checkpointer, "restore", MemoryError(), times=2)
        assert_same_bits(load_checkpoint(run).params, state_at(2).params)

    def test_of_metadata_are_tried_again(self, run, monkeypatch):
        failing(monkeypatch, Path, "read_text", OSError(errno.EIO, "Input/output error"), 2, "2/meta/metadata")
        assert load_checkpoint(run).step == 2

    @pytest.mark.parametrize(
        ("owner", "name", "error", "where"),
        [
            (ocp.Checkpointer, "restore", MemoryError("out of memory"), ""),
            (ocp.Checkpointer, "restore", RuntimeError("RESOURCE_EXHAUSTED: out of memory"), ""),
            (Path, "open", OSError(errno.EIO, "out of order"), "params/_METADATA"),
            (Path, "read_text", OSError(errno.ESTALE, "out of reach"), "2/meta/metadata"),
        ],
    )
    def test_that_go_on_end_the_run_and_change_nothing(self, run, tmp_path, monkeypatch, owner, name, error, where):
        copy = tmp_path / "run"
        shutil.copytree(run, copy)
        if owner is Path and name == "open":  # Orbax says no more than that it has no metadata
            failing(monkeypatch, ocp.Checkpointer, "restore", Exception("Encountered error"), times=-1)
        with store_in(copy) as store:
            failing(monkeypatch, owner, name, error, times=-1, where=where)
            with pytest.raises(
                UnreadableCheckpointError, match=r"could not be read \(.*out of .*\), 3 times; it may be"
            ):
                restore_newest(store, NO_LOCAL, state_at(0), CONFIG, DATASETS)
        monkeypatch.undo()
        assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["1", "2"]
        with store_in(copy) as store:
            assert int(restore_newest(store, NO_LOCAL, state_at(0), CONFIG, DATASETS)[0].step) == 2

    def test_of_the_best_do_not_remove_it(self, tmp_path, monkeypatch):
        saved(tmp_path, {1: 1.0, 2: 3.0}, keep_last=1)
        failing(monkeypatch, Path, "read_text", OSError(errno.EIO, "out"), -1, "1/meta/metadata")
        with pytest.raises(UnreadableCheckpointError):
            store_in(tmp_path, keep_last=1)
        monkeypatch.undo()
        assert find_checkpoint(tmp_path, "best").name == "1"


class TestOtherModel:
    def test_one_of_other_code_is_refused_with_the_difference(self, run, tmp_path):
        copy = tmp_path / "run"
        shutil.copytree(run, copy)
        like = state_at(0)
        like = like._replace(params=like.params | {"gate": jnp.zeros(3)})
        with (
            store_in(copy) as store,
            pytest.raises(CheckpointError, match=r"differ, such as gate: absent in the ch") as e,
        ):
            restore_newest(store, NO_LOCAL, like, CONFIG, DATASETS)
        assert not isinstance(e.value, CorruptCheckpointError)
        assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["1", "2"]


class TestLostHistory:
    """A run folder without a checkpoint that must have had one."""

    def history(self, folder: Path, last: int) -> Path:
        records = ({"kind": "train", "step": step} for step in range(1, last + 1))
        folder.mkdir(exist_ok=True)
        (folder / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
        return folder

    def test_metrics_of_more_steps_than_two_checkpoints_take(self, tmp_path):
        with (
            store_in(self.history(tmp_path / "run", 21)) as store,
            pytest.raises(CheckpointError, match=r"has metrics up to step 21, but no checkpoint .* --allow_restart"),
        ):
            refuse_lost_history(tmp_path / "run", store, 10)

    def test_damaged_ones_alone(self, tmp_path):
        with store_in(self.history(tmp_path / "run", 3)) as store:
            (store.folder / "2.corrupt").mkdir()
            with pytest.raises(CheckpointError, match=r"up to step 3 and the damaged 2.corrupt, but no checkpoint"):
                refuse_lost_history(tmp_path / "run", store, 10)

    def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(self, tmp_path):
        with store_in(self.history(tmp_path / "run", 20)) as store:
            refuse_lost_history(tmp_path / "run", store, 10)


def damage(path: Path, how: str) -> None:
    """Flips a bit in the middle, cuts the file in half, or deletes it."""
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif data:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


class TestFingerprint:
    def test_sees_bits_order_and_types(self):
        x = jnp.arange(12.0).reshape(3, 4)
        variants = [x, x.at[1, 2].set(-6.0), x[::-1], x.T.reshape(3, 4), jnp.zeros((3, 4)), x.astype(jnp.bfloat16)]
        numbers = {fingerprints({"x": variant})["x"] for variant in variants}
        assert len(numbers) == len(variants)

    def test_is_the_same_for_the_same_bits(self):
        tree = {"a": {"b": jnp.float32(3)}, "c": jnp.ones((2, 2, 2), jnp.int32)}
        assert fingerprints(tree) == fingerprints(jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), tree))
        assert set(fingerprints(tree)) == {"a/b", "c"}


class TestSameExperiment:
    def meta(self, config: ExperimentConfig = CONFIG) -> dict:
        return {"step": 7, "config": json.loads(json.dumps(to_dict(config))), "datasets": DATASETS}

    def test_what_cannot_change_the_steps_may_change(self):
        changed = replace(CONFIG, "training", log_every=7, eval_every=1, checkpoint_every=9, keep_last=5)
        changed = replace(changed, "data", data_dir="elsewhere")
        refuse_other_experiment(self.meta(), changed, DATASETS)

    def test_all_else_is_refused_with_what_changed(self):
        changed = replace(replace(CONFIG, "training", steps=9), "model", pattern=("aamoe",))
        with pytest.raises(CheckpointError.__base__) as caught:
            refuse_other_experiment(self.meta(), changed, DATASETS)
        message = str(caught.value)
        assert "TrainingConfig.steps: 8 -> 9" in message
        assert "ModelConfig.pattern: ['parallel'] -> ['aamoe']" in message
        assert "TrainingConfig.log_every" in message.splitlines()[-1]

    def test_other_data_under_the_same_name(self):
        other = {"code": DATASETS["code"] | {"corpus_digest": "xyz"}}
        with pytest.raises(CheckpointError.__base__, match="corpus_digest of code: 'abc' -> 'xyz'"):
            refuse_other_experiment(self.meta(), CONFIG, other)

    def test_fields_that_only_one_version_knows(self):
        old = to_dict(CONFIG)
        old["model"]["gone"] = old["model"].pop("norm")
        assert changed_fields(old, to_dict(CONFIG), ExperimentConfig) == {
            "ModelConfig.gone": ("rms", "absent"),
            "ModelConfig.norm": ("absent", "rms"),
        }

    def test_other_libraries_are_no_error(self, tmp_path, capsys):
        saved(tmp_path, {1: None})
        path = tmp_path / "checkpoints" / "1" / "meta" / "metadata"
        meta = read_meta(tmp_path / "checkpoints" / "1")
        meta["versions"]["jax"] = "0.0.1"
        path.write_text(json.dumps(meta | {"digest": _digest(meta)}))
        with store_in(tmp_path) as store:
            assert int(restore_newest(store, NO_LOCAL, state_at(0), CONFIG, DATASETS)[0].step) == 1
        assert "jax 0.0.1 ->" in capsys.readouterr().err


def test_folders_with_digits_of_other_scripts_are_no_checkpoints(tmp_path):
    for name in ("3", "٣", "²", "x"):
        (tmp_path / name / "meta").mkdir(parents=True)
    assert saved_steps(tmp_path) == [3]
    assert find_checkpoint(tmp_path).name == "3"
