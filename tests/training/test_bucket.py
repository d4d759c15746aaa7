"""A run folder in a bucket, piece by piece, against a server of the tests' own: paths, metrics, owner, checkpoints."""

from __future__ import annotations

import json
import re
import threading
import types
from typing import Any

import jax.numpy as jnp
import pytest

pytest.importorskip("gcsfs", reason="pip install -c constraints.txt -e '.[gcs]'")

import gcsfs.retry

from aamoe_jax import files
from aamoe_jax.bucket import BucketPath, location
from aamoe_jax.config import ConfigError
from aamoe_jax.files import SaveError, write_whole
from aamoe_jax.training import checkpoints, owner
from aamoe_jax.training.checkpoints import COMMIT, CheckpointStore, InUseError, find_checkpoint, saved_steps
from aamoe_jax.training.goodput import Attempts, Stopwatch, read_attempts
from aamoe_jax.training.metrics import MetricsLog, read_metrics
from aamoe_jax.training.owner import Owner
from tests.fake_gcs import FakeGCS


@pytest.fixture(scope="module")
def server():
    """One for the module: tensorstore reads its address once."""
    with pytest.MonkeyPatch.context() as patch, FakeGCS("bucket") as running:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture
def run(server, request) -> BucketPath:
    """A run folder of the test's own."""
    yield location("run_dir", f"gs://bucket/{request.node.name.replace('[', '_').replace(']', '')}")
    server.fail(0)


@pytest.fixture
def impatient(monkeypatch):
    """Requests are sent again at once."""

    async def at_once(seconds: float) -> None:
        del seconds

    monkeypatch.setattr(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=at_once))


def record(step: int) -> dict[str, Any]:
    return {"kind": "train", "step": step}


def steps_of(run: BucketPath) -> list[int]:
    return [found["step"] for found in read_metrics(run)]


def unfinished(run: BucketPath, step: int) -> BucketPath:
    """A checkpoint whose writing was cut short."""
    folder = run / "checkpoints" / str(step)
    (folder / "params" / "d" / "part").write_text("half")
    (folder / "meta" / "metadata").write_text("{}")
    return folder


class TestPaths:
    def test_a_file_is_whole_and_a_folder_is_what_has_something_in_it(self, run):
        assert not run.exists()
        write_whole(run / "a" / "b.txt", "text ends so\n\n")
        assert (run / "a" / "b.txt").read_text() == "text ends so\n\n"
        assert (run / "a" / "b.txt").is_file()
        assert (run / "a").is_dir()
        assert not (run / "a").is_file()
        assert not (run / "a" / "b").exists()
        assert [path.name for path in run.iterdir()] == ["a"]
        assert run.files() == [run / "a" / "b.txt"]
        assert run.absolute() == run.resolve() == run

    def test_ten_thousand_keys_are_listed(self, server, run):
        for number in range(10_000):
            server.put("bucket", f"{run.name}/checkpoints/{number}/{COMMIT}", b"")
        server.put("bucket", f"{run.name}/checkpoints/10000/params", b"")
        before = len(server.requests)
        assert sum(1 for _ in (run / "checkpoints").glob("*")) == 10_001
        assert len(server.requests) - before == 11  # pages of a thousand
        assert len(run.files()) == 10_001

    def test_what_another_process_writes_is_seen_at_once(self, server, run):
        assert list(run.glob("*")) == []
        server.put("bucket", f"{run.name}/new", b"1")
        assert [path.name for path in run.glob("*")] == ["new"]

    def test_failing_requests_are_sent_again(self, server, run, impatient):
        server.fail(0.3)
        before = server.failed
        for number in range(20):
            write_whole(run / str(number), str(number))
            assert (run / str(number)).read_text() == str(number)
        assert sorted(int(path.name) for path in run.glob("*")) == list(range(20))
        run.rmtree()
        assert server.failed > before + 10
        server.fail(0)
        assert server.names("bucket", f"{run.name}/") == []

    @pytest.mark.parametrize("code", [503, 429, 403, 401])
    def test_a_failure_never_reads_as_there_is_nothing(self, server, run, impatient, code):
        write_whole(run / "checkpoints" / "3" / COMMIT, "")
        server.fail(1.0, (code,))
        for look in (
            run.exists,
            run.is_dir,
            (run / "x").is_file,
            lambda: list(run.glob("*")),
            lambda: saved_steps(run),
        ):
            with pytest.raises(OSError, match=r"fails by intention|Forbidden") as caught:
                look()
            assert caught.value.filename.startswith("gs://bucket/")
        with pytest.raises(SaveError, match=rf"{run}/a could not be written: .*(fails by intention|Forbidden)"):
            write_whole(run / "a", "")

    def test_other_addresses_are_refused(self):
        for address in (
            "s3://bucket/run",
            "http://host/run",
            "gs:/bucket/run",
            "gs://",
            "gs://Bucket/run",
            "gs://bucket/run[12]",  # the libraries would take it for a pattern, and remove what fits
            "hdfs://a/b",
        ):
            with pytest.raises(ConfigError, match=r"run_dir = '.*': must be a path or gs://BUCKET/FOLDER; mount other"):
                location("run_dir", address)


class TestMetrics:
    def test_they_are_written_in_parts_that_readers_join(self, server, run, monkeypatch):
        monkeypatch.setattr(files, "PART_BYTES", 200)
        with MetricsLog(run, resume_step=0) as log:
            for step in range(1, 21):
                log.write(record(step))
                log.sync()
        assert steps_of(run) == list(range(1, 21))
        parts = server.names("bucket", f"{run.name}/metrics/")
        assert len(parts) > 3
        assert parts[0].endswith("/metrics/00000-00000000.jsonl")

    def test_steps_that_are_done_again_are_superseded(self, server, run, monkeypatch):
        monkeypatch.setattr(files, "PART_BYTES", 200)
        with MetricsLog(run, resume_step=0) as log:
            for step in range(1, 21):
                log.write(record(step))
                log.sync()
        with MetricsLog(run, resume_step=10, expected=10) as log:
            assert log.count == 10
            assert steps_of(run)[:10] == list(range(1, 11))  # what is superseded may be there until the next part is
            log.write(record(11) | {"again": True})
            log.sync()
            assert steps_of(run) == list(range(1, 12))
        assert read_metrics(run)[-1]["again"]

    def test_what_a_former_owner_still_writes_is_superseded(self, run):
        former = MetricsLog(run, resume_step=0)
        for step in (1, 2):
            former.write(record(step))
        former.sync()
        with MetricsLog(run, resume_step=2) as log:
            log.write(record(3))
            log.sync()
            for step in (3, 4):
                former.write(record(step) | {"former": True})
            former.sync()
        assert steps_of(run) == [1, 2, 3]
        assert "former" not in read_metrics(run)[2]

    def test_lines_that_cannot_be_read_stay_and_are_told(self, server, run, capfd):
        server.put("bucket", f"{run.name}/metrics/00000-00000000.jsonl", b'{"kind": "train", "step": 1}\n\0\n')
        with MetricsLog(run, resume_step=1, expected=1) as log:
            log.write(record(2))
        with MetricsLog(run, resume_step=2, expected=2):
            pass
        assert steps_of(run) == [1, 2]
        assert capfd.readouterr().err.count("metrics.jsonl: 1 lines cannot be read (line 2); left there") == 1

    def test_storage_that_fails_is_a_save_error(self, server, run, impatient):
        with MetricsLog(run, resume_step=0) as log:
            log.write(record(1))
            server.fail(1.0, (503,))
            with pytest.raises(SaveError, match=r"metrics\.jsonl could not be written: fails by intention"):
                log.sync()
            server.fail(0)
        assert steps_of(run) == [1]  # written when the log was closed

    def test_starts_of_a_run_are_kept(self, run):
        for _ in range(2):
            with Attempts(run, Stopwatch()) as attempts:
                attempts.begin(3)
        assert [attempt["from_step"] for attempt in read_attempts(run)] == [3, 3]


class TestOwner:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        for name, seconds in {"BEAT_SECONDS": 0.05, "DEAD_SECONDS": 0.5, "SETTLE_SECONDS": 0.1}.items():
            monkeypatch.setattr(owner, name, seconds)

    def test_one_of_many_gets_the_folder(self, server, run):
        """The storage decides: all see that there is no owner."""
        got, refused, ready = [], [], threading.Barrier(8)

        def take() -> None:
            one = Owner(run)
            ready.wait()
            try:
                got.append(one.__enter__())
            except InUseError as error:
                refused.append(error)

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(got), len(refused)) == (1, 7)
        got[0].__exit__(None, None, None)
        assert server.names("bucket", f"{run.name}/") == []

    def test_it_makes_the_file_though_the_answer_was_lost(self, server, run, impatient, monkeypatch):
        chance = iter([(503, True)])
        monkeypatch.setattr(server, "_chance", lambda: next(chance, (None, False)))
        with Owner(run) as one:
            one.confirm()
        assert server.names("bucket", f"{run.name}/") == []

    def test_a_dead_one_is_replaced_and_one_that_comes_back_ends(self, server, run, monkeypatch):
        with Owner(run) as first:
            monkeypatch.setattr(owner, "_where", lambda: "another machine")
            first._ended.set()  # frozen
            first._thread.join()
            with Owner(run) as second:
                second.confirm()
                with pytest.raises(InUseError, match="has taken"):
                    first.confirm()
                first.__exit__(None, None, None)
                second.confirm()  # the first one has not removed the file of the second

    def test_without_a_bucket_or_credentials_there_is_no_run(self, server, monkeypatch):
        with pytest.raises(ConfigError, match=r"cannot be a run folder: no such object, or no bucket 'no-bucket'"):
            Owner(location("run_dir", "gs://no-bucket/run")).__enter__()
        monkeypatch.setattr(server, "denied", True)
        with pytest.raises(ConfigError, match=r"the storage refuses .*Anonymous caller.* log in, by `gcloud auth"):
            Owner(location("run_dir", "gs://bucket/run")).__enter__()


class TestCheckpoints:
    def test_one_without_its_commit_is_neither_counted_nor_kept(self, run):
        folder = unfinished(run, 4)
        assert saved_steps(run / "checkpoints") == []
        with pytest.raises(ConfigError, match="there is no checkpoint in"):
            find_checkpoint(run)
        (run / "checkpoints" / "3.corrupt" / "params").write_text("of another day")
        with CheckpointStore(run / "checkpoints", keep_last=2) as store:
            assert store.steps() == []
        assert not folder.exists()
        assert (run / "checkpoints" / "3.corrupt").is_dir()

    def test_removing_begins_with_the_commit(self, server, run):
        folder = unfinished(run, 4)
        (folder / COMMIT).write_text("")
        before = len(server.requests)
        checkpoints.remove_checkpoint(folder)
        removed = [request for request in server.requests[before:] if request.startswith("DELETE")]
        assert removed[0].endswith(f"/checkpoints/4/{COMMIT}")
        assert len(removed) > 2
        assert not folder.exists()

    def test_one_that_is_set_aside_is_whole_there(self, run):
        folder = unfinished(run, 4)
        (folder / "meta" / "metadata").write_text(json.dumps({"format": 1}))
        (folder / COMMIT).write_text("")
        (run / "checkpoints" / "4.corrupt" / "old").write_text("")
        with CheckpointStore(run / "checkpoints", keep_last=2) as store:
            assert store.steps() == [4]
            aside = store.set_aside(4)
            assert store.steps() == []
        assert sorted(str(path).removeprefix(f"{aside}/") for path in aside.files()) == [
            COMMIT,
            "meta/metadata",
            "params/d/part",
        ]
        assert not folder.exists()

    def test_arrays_are_written_and_read(self, server, run):
        with CheckpointStore(run / "checkpoints", keep_last=2) as store:
            save_tree(store, 7, {"a": jnp.arange(1000.0)})
            store.wait()
        assert saved_steps(run / "checkpoints") == [7]
        found = checkpoints._restore(run / "checkpoints" / "7", "params")
        assert (found["a"] == jnp.arange(1000.0)).all()
        assert any(re.search(r"/checkpoints/7/params/.*d/", name) for name in server.names("bucket"))

    def test_a_damaged_array_is_read_as_damaged_and_not_as_missing_storage(self, server, run, monkeypatch):
        monkeypatch.setattr(checkpoints, "RETRY_AFTER", ())
        with CheckpointStore(run / "checkpoints", keep_last=2) as store:
            save_tree(store, 7, {"a": jnp.arange(1000.0)})
            store.wait()
        server.put("bucket", f"{run.name}/checkpoints/7/params/manifest.ocdbt", b"nonsense")
        with pytest.raises(checkpoints.CorruptCheckpointError, match="is damaged"):
            checkpoints._restore(run / "checkpoints" / "7", "params")


def save_tree(store: CheckpointStore, step: int, tree: dict[str, Any]) -> None:
    """Without the state of a training around it."""
    save = checkpoints.ocp.args.StandardSave(tree)
    store._writing, store._losses[step] = step, None
    store._checkpointer.save(str(store._directory(step)), args=checkpoints.ocp.args.Composite(params=save))
