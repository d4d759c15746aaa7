"""Six bad days of a small run, on real processes; and a drill that notices what it is there for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.training.checkpoints import saved_steps
from aamoe_jax.training.metrics import FILE
from experiments import drill
from launch import train
from tests.training.helpers import tiny_data

pytestmark = pytest.mark.distributed
GIN = """
ModelConfig:
    d_model = 32
    num_heads = 2
    num_layers = 1
    d_ff = 32
    pattern = ('parallel',)
DataConfig:
    mixture = (('tiny', 1.0),)
    seq_len = 64
    document_align = 8
TrainingConfig:
    steps = 16
    batch_size = 4
    log_every = 1
    eval_every = 8
    eval_batches = 1
    checkpoint_every = 4
"""
STEPS = 16
SCENARIOS = 6


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> tuple[Path, dict[int, drill.Outcome]]:
    """The folder of the run that nothing disturbed, and what became of those that were, two at a time."""
    folder = tmp_path_factory.mktemp("drill")
    data = tiny_data(folder / "data")
    (folder / "tiny.gin").write_text(GIN + f"DataConfig.data_dir = {data.data_dir!r}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        arguments = [f"--gin_file={folder / 'tiny.gin'}"]
        outcomes = drill.drill(folder, arguments, STEPS, range(SCENARIOS), at_once=2, most_starts=2)
    return folder / "unbroken", outcomes


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_a_bad_day_is_as_if_it_had_not_been(played, seed):
    outcome = played[1][seed]
    assert not outcome.verdict.startswith("FAILED"), (outcome.starts, outcome.verdict, outcome.detail)


class TestCompare:
    @pytest.fixture
    def run(self, played, tmp_path) -> Path:
        return Path(shutil.copytree(played[0], tmp_path / "run"))

    def judged(self, run: Path, played: tuple, **changed) -> str:
        values = {"lost": set(), "same_mesh": True} | changed
        return drill.compare(run, played[0], values["lost"], same_mesh=values["same_mesh"])

    def change(self, run: Path, function) -> None:
        records = [json.loads(line) for line in (run / FILE).read_text().splitlines()]
        (run / FILE).write_text("".join(json.dumps(record) + "\n" for record in function(records)))

    def test_a_copy_is_equal(self, run, played):
        assert self.judged(run, played) == "equal"

    @pytest.mark.parametrize(
        ("function", "complaint"),
        [
            (lambda records: records[:3] + records[4:], "records are missing"),
            (lambda records: [records[0], *records], "records twice"),
            (lambda records: [records[0] | {"loss": records[0]["loss"] * (1 + 1e-7)}, *records[1:]], "differ in bits"),
        ],
    )
    def test_a_record_that_is_missing_doubled_or_different(self, run, played, function, complaint):
        self.change(run, function)
        with pytest.raises(drill.FailedError, match=complaint):
            self.judged(run, played)

    def test_what_was_destroyed_may_be_missing(self, run, played):
        self.change(run, lambda records: records[:3] + records[4:])
        assert self.judged(run, played, lost={("train", 4)}) == "explained: 1 records destroyed"

    def test_another_mesh_may_differ_by_little(self, run, played):
        for off, passes in ((1e-6, True), (1e-4, False)):
            self.change(
                run, lambda records, off=off: [records[0] | {"loss": records[0]["loss"] * (1 + off)}, *records[1:]]
            )
            if passes:
                assert self.judged(run, played, same_mesh=False).startswith(
                    "explained: other mesh, losses within 1e-06"
                )
            else:
                with pytest.raises(drill.FailedError, match="on another mesh losses differ by 1"):
                    self.judged(run, played, same_mesh=False)

    def test_what_is_left_behind(self, run, played):
        (run / "owner.json").write_text("{}")
        with pytest.raises(drill.FailedError, match=r"left behind: owner\.json"):
            self.judged(run, played)

    def test_a_checkpoint_of_other_bits(self, run, played):
        shutil.rmtree(run / "checkpoints" / str(saved_steps(run / "checkpoints")[-1]))
        with pytest.raises(drill.FailedError, match="differ in bits"):
            self.judged(run, played)


def test_the_log_goes_on_where_it_was(tmp_path, capsys):
    outcomes = {
        3: drill.Outcome("KILL on 1 x 4", [0.5], "equal"),
        4: drill.Outcome("EIO on 1 x 4", [], "FAILED: x", "why"),
    }
    log = drill.Log(tmp_path / "drill", ["a = 1"])
    for seed, outcome in outcomes.items():
        log.add(seed, outcome)
    assert drill.Log(tmp_path / "drill", ["a = 1"]).outcomes == outcomes
    text = (tmp_path / "drill.md").read_text()
    assert "2 scenarios: 1 FAILED, 1 equal" in text
    assert "| 3 | KILL on 1 x 4 | 0.5 | equal |" in text
    assert "4: EIO on 1 x 4: FAILED: x\nwhy" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="its log is of other runs"):
        drill.Log(tmp_path / "drill", ["a = 2"])


def test_exit_codes_are_those_of_the_program():
    names = ("EXIT_REFUSED", "EXIT_NOT_SAVED", "EXIT_IN_USE", "EXIT_SIGNAL")
    assert [vars(drill)[name] for name in names] == [vars(train)[name] for name in names]
