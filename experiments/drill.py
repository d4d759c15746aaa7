"""A drill with real processes: runs have bad days, drawn at random, and must end as a run without any.

    python -m experiments.drill --scenarios=100 --output=experiments/results/drill

A scenario is a run that is started one to three times, each time on random processes and devices, and disturbed: by a
signal, a kill, a freeze, a full disk, a file that cannot be read or is torn, or a second run in its folder. Then it is
started once more and left alone. Its metrics and its last checkpoint must be those of a run that nothing disturbed,
to the last bit where all of its meshes had as many devices. Writes OUTPUT.json and OUTPUT.md after every scenario, and
goes on there when it is started again; ends with 1 if a scenario failed.
"""

from __future__ import annotations

import collections
import json
import os
import random
import resource
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
from absl import flags

from aamoe_jax.config import ConfigError
from aamoe_jax.data import ensure_prepared
from aamoe_jax.files import write_whole
from aamoe_jax.training.checkpoints import FOLDER, find_checkpoint, read_meta, saved_steps
from aamoe_jax.training.distributed import EXIT_LOST
from aamoe_jax.training.metrics import FILE, read_metrics
from aamoe_jax.training.metrics import TIMING_FIELDS as TIMED
from experiments.binding import load_experiment
from experiments.jobs import Job, Layout, last_step
from experiments.program import command_line, plain_table, start

FLAGS = flags.FLAGS

EXIT_REFUSED, EXIT_NOT_SAVED, EXIT_IN_USE, EXIT_SIGNAL = 1, 4, 7, 128
"""Exit codes of launch.train. A signal's number is added to the last."""
UNBROKEN = Layout(1, 4)
SAME_MESH = (Layout(1, 4), Layout(1, 4), Layout(2, 2))
OTHER_MESHES = (Layout(1, 1), Layout(2, 1), Layout(1, 2))
OTHER_MESH_SHARE = 0.15
"""Of the starts, so many are on another mesh."""
TOLERANCE = 1e-5
"""Largest relative difference of a loss where a mesh had another number of devices: sums are in another order."""
LEFT = {"config.gin", "config.json", "attempts.jsonl", FILE, FOLDER, "metrics.damaged"}
"""All that may lie in the folder of a run that has ended, beside `stacks.*.txt`."""


class FailedError(AssertionError):
    """Something was lost, or ended in another way than it should."""


class Scene(NamedTuple):
    """What a disturbance works on."""

    run_dir: Path
    arguments: Sequence[str]
    layout: Layout
    steps: int
    chance: random.Random

    def job(self) -> Job:
        """Starts the run."""
        return Job(self.run_dir, self.arguments, self.layout)


class Disturbed(NamedTuple):
    """How a start of a run ended that was disturbed."""

    what: str
    seconds: float | None = None
    """From the disturbance to the end of all processes, where it was to end them."""


def signalled(scene: Scene, number: signal.Signals) -> Disturbed:
    """A signal to one process at a random moment: all stop after the same step, or had finished."""
    with scene.job() as job:
        moment = _await_moment(scene, job)
        victim, began = scene.chance.randrange(scene.layout.processes), time.monotonic()
        job.processes[victim].send_signal(number)
        codes = job.wait(300)
        # Before Python has taken over, and after it has let go, a signal does what it does to any process.
        allowed = {EXIT_SIGNAL + number, -number, 0}
        _require(set(codes) <= allowed and (len(set(codes)) == 1), f"exit codes {codes}", job)
        return Disturbed(f"{number.name} {moment}", time.monotonic() - began)


def killed(scene: Scene) -> Disturbed:
    """One process is gone at once; the others notice."""
    with scene.job() as job:
        moment = _await_moment(scene, job)
        victim, began = scene.chance.randrange(scene.layout.processes), time.monotonic()
        job.processes[victim].kill()
        codes = job.wait(300)
        survivors = {code for index, code in enumerate(codes) if index != victim}
        _require(survivors <= {EXIT_LOST, 0}, f"exit codes {codes}", job)
        return Disturbed(f"KILL {moment}", time.monotonic() - began)


def frozen(scene: Scene) -> Disturbed:
    """One process stands still for a moment: the run goes on."""
    with scene.job() as job:
        moment = _await_moment(scene, job)
        victim = job.processes[scene.chance.randrange(scene.layout.processes)]
        victim.send_signal(signal.SIGSTOP)
        time.sleep(scene.chance.uniform(0.5, 4.0))
        victim.send_signal(signal.SIGCONT)
        codes = job.wait(300)
        _require(set(codes) == {0}, f"exit codes {codes}", job)
        return Disturbed(f"frozen {moment}")


def full(scene: Scene) -> Disturbed:
    """The disk of one process is full: no file grows beyond a few bytes."""
    with scene.job() as job:
        moment = _await_moment(scene, job)
        victim, began = scene.chance.randrange(scene.layout.processes), time.monotonic()
        limit = scene.chance.randrange(1000, 60_000)
        if job.processes[victim].poll() is None:
            resource.prlimit(job.processes[victim].pid, resource.RLIMIT_FSIZE, (limit, limit))
        codes = job.wait(300)
        _require(set(codes) <= {EXIT_NOT_SAVED, EXIT_LOST, 0}, f"exit codes {codes}", job)
        return Disturbed(f"disk full {moment}", time.monotonic() - began if any(codes) else None)


def second_run(scene: Scene) -> Disturbed:
    """Another run in the folder is refused; the first goes on."""
    with scene.job() as job:
        job.wait_for_output("starting", "resuming")
        codes = [0]
        if job.processes[0].poll() is None:
            with scene.job() as second:
                codes = second.wait(300)
                refused = _ends(codes, EXIT_IN_USE)
                _require(refused or job.processes[0].poll() is not None, f"the second run ended with {codes}", second)
        first = job.wait(300)
        _require(set(first) == {0}, f"beside a second run, the first ended with {first}", job)
        return Disturbed("second run")


def unreadable(scene: Scene) -> Disturbed:
    """A file of the newest checkpoint cannot be read: the run ends, nothing is changed, and the file comes back."""
    file = scene.chance.choice(_files(scene))
    kept = file.with_name(f"{file.name}.kept")
    before = sorted(path.name for path in (scene.run_dir / FOLDER).iterdir())
    file.rename(kept)
    file.symlink_to("/proc/self/mem")  # whose first page is nobody's: EIO
    try:
        with scene.job() as job:
            codes = job.wait(300)
            _require(_ends(codes, EXIT_NOT_SAVED), f"a checkpoint with EIO ended with {codes}", job)
            after = sorted(path.name for path in (scene.run_dir / FOLDER).iterdir())
            _require(before == after, f"a failed read changed {before} to {after}", job)
    finally:
        file.unlink()
        kept.rename(file)
    return Disturbed("EIO")


def torn_checkpoint(scene: Scene) -> Disturbed:
    """A file of the newest checkpoint is cut off: the one before is taken, or, where there is none, the run refused."""
    file, steps = scene.chance.choice(_files(scene)), saved_steps(scene.run_dir / FOLDER)
    held = file.read_bytes()
    file.write_bytes(held[: scene.chance.randrange(len(held))])
    with scene.job() as job:
        codes = job.wait(300)
        if len(steps) > 1:
            _require(set(codes) == {0}, f"a torn checkpoint ended with {codes}", job)
            return Disturbed("torn checkpoint")
        _require(_ends(codes, EXIT_REFUSED), f"the only checkpoint, torn, ended with {codes}", job)
        _require(saved_steps(scene.run_dir / FOLDER) == steps, "the only checkpoint was renamed", job)
    file.write_bytes(held)
    return Disturbed("only checkpoint torn")


def torn_metrics(scene: Scene) -> Disturbed:
    """Some bytes in the middle of the metrics are overwritten."""
    path = scene.run_dir / FILE
    held = bytearray(path.read_bytes())
    at = scene.chance.randrange(max(len(held) - 40, 1))
    held[at : at + 40] = b"\xff" * len(held[at : at + 40])
    path.write_bytes(held)
    with scene.job() as job:
        codes = job.wait(300)
        _require(set(codes) == {0}, f"torn metrics ended with {codes}", job)
        _require("cannot be read" in job.output(0), "nothing was said of torn metrics", job)
    return Disturbed("torn metrics")


ANYTIME: dict[str, Callable[[Scene], Disturbed]] = {
    "TERM": lambda scene: signalled(scene, signal.SIGTERM),
    "INT": lambda scene: signalled(scene, signal.SIGINT),
    "KILL": killed,
    "frozen": frozen,
    "full": full,
    "second run": second_run,
}
WITH_CHECKPOINT = {"EIO": unreadable, "torn checkpoint": torn_checkpoint, "torn metrics": torn_metrics}
"""These need something to tear."""


class Outcome(NamedTuple):
    """What became of a scenario."""

    starts: str
    stops: list[float]
    verdict: str
    """Begins with `equal`, `explained` or `FAILED`."""
    detail: str = ""


def play(
    run_dir: Path,
    unbroken: Path,
    arguments: Sequence[str],
    steps: int,
    chance: random.Random,
    most_starts: int,
) -> Outcome:
    """One scenario."""
    said, stops, meshes = [], [], set()
    lost: set[tuple[str, int]] = set()
    try:
        for _ in range(chance.randint(1, most_starts)):
            others = chance.random() < OTHER_MESH_SHARE
            scene = Scene(run_dir, arguments, chance.choice(OTHER_MESHES if others else SAME_MESH), steps, chance)
            able = ANYTIME | (WITH_CHECKPOINT if saved_steps(run_dir / FOLDER) else {})
            name, before = chance.choice(sorted(able)), _keys(run_dir)
            said.append(f"{name} on {scene.layout}")
            disturbed = able[name](scene)
            said[-1] = f"{disturbed.what} on {scene.layout}"
            stops += [] if disturbed.seconds is None else [disturbed.seconds]
            meshes.add(scene.layout.processes * scene.layout.devices)
            lost |= before - _keys(run_dir) if name == "torn metrics" else set()
            _require_no_orphan(run_dir)
        scene = Scene(run_dir, arguments, chance.choice(SAME_MESH), steps, chance)
        with scene.job() as job:
            codes = job.wait(300)
            _require(set(codes) == {0}, f"undisturbed, it ended with {codes}", job)
        _require_no_orphan(run_dir)
        verdict = compare(run_dir, unbroken, lost, same_mesh=meshes <= {UNBROKEN.processes * UNBROKEN.devices})
    except (FailedError, TimeoutError) as error:
        first, _, rest = str(error).partition("\n")
        return Outcome("; ".join(said), stops, f"FAILED: {first}", rest)
    return Outcome("; ".join(said), stops, verdict)


def compare(run_dir: Path, unbroken: Path, lost: set[tuple[str, int]], *, same_mesh: bool) -> str:
    """The verdict over a run that has finished.

    Args:
      lost: records that a disturbance destroyed: they cannot be made again.

    Raises:
      FailedError: it differs from the unbroken run in what it should not.
    """
    left = {path.name for path in run_dir.iterdir() if not path.match("stacks.*.txt")}
    litter = (left - LEFT) | {path.name for path in (run_dir / FOLDER).glob("*tmp*")}
    if litter:
        raise FailedError(f"left behind: {', '.join(sorted(litter))}")
    one, other = ([_untimed(record) for record in read_metrics(run)] for run in (run_dir, unbroken))
    keys = [(record["kind"], record["step"]) for record in one]
    if doubled := [key for key, times in collections.Counter(keys).items() if times > 1]:
        raise FailedError(f"records twice: {doubled}")
    expected = [record for record in other if (record["kind"], record["step"]) not in lost]
    if keys != [(record["kind"], record["step"]) for record in expected]:
        raise FailedError(f"records are missing, or too many: {set(keys) ^ {(r['kind'], r['step']) for r in expected}}")
    torn = f"explained: {len(lost)} records destroyed" if lost else ""
    saved = [read_meta(find_checkpoint(run))["fingerprints"] for run in (run_dir, unbroken)]
    if same_mesh:
        if one != expected or saved[0] != saved[1]:
            raise FailedError("metrics or the last checkpoint differ in bits")
        return torn or "equal"
    worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(one, expected, strict=True))
    if worst > TOLERANCE:
        raise FailedError(f"on another mesh losses differ by {worst:.1e}")
    return f"{torn}, other mesh" if torn else f"explained: other mesh, losses within {worst:.0e}"


def _untimed(record: dict) -> dict:
    return {name: value for name, value in record.items() if name not in TIMED}


def _keys(run_dir: Path) -> set[tuple[str, int]]:
    return {(record["kind"], record["step"]) for record in read_metrics(run_dir)}


def _files(scene: Scene) -> list[Path]:
    """Files of the newest checkpoint that hold what was saved."""
    directory = find_checkpoint(scene.run_dir)
    found = [directory / "meta" / "metadata", *directory.glob("params/d/*"), *directory.glob("optimizer/d/*")]
    return sorted(path for path in found if path.stat().st_size)


def _await_moment(scene: Scene, job: Job) -> str:
    """Waits for a random moment in the life of a run, or its end; says which."""
    if scene.layout.processes > 1:  # before they have met, processes wait long for one that is gone
        job.wait_for_output("starting", "resuming")
    kind = scene.chance.choice(("soon", "step", "step", "save"))
    began = time.monotonic()
    if kind == "soon":
        time.sleep(scene.chance.uniform(0.0, 8.0 if scene.layout.processes == 1 else 2.0))
        return f"{time.monotonic() - began:.1f} s after its start"
    wanted = last_step(scene.run_dir) + scene.chance.randrange(1, max(scene.steps - last_step(scene.run_dir), 2))
    while all(process.poll() is None for process in job.processes):
        if kind == "step" and last_step(scene.run_dir) >= wanted:
            return f"at step {wanted}"
        if kind == "save" and any((scene.run_dir / FOLDER).glob("*tmp*")):
            return "while it saves"
        time.sleep(0.02)
    return "after its end"


def _ends(codes: Sequence[int], code: int) -> bool:
    """Whether a run ended for this reason. A process that is slow to say so may find the first one gone."""
    return code in codes and set(codes) <= {code, EXIT_LOST}


def _require(condition: bool, complaint: str, job: Job) -> None:
    if not condition:
        raise FailedError(f"{complaint}\n{job.outputs()}")


def _require_no_orphan(run_dir: Path) -> None:
    for process in psutil.process_iter(["pid", "cmdline"]):
        if str(run_dir) in (process.info["cmdline"] or []):
            raise FailedError(f"process {process.pid} is left")


def report(command: str, outcomes: Mapping[int, Outcome]) -> str:
    """The log of the drill as Markdown."""
    verdicts = collections.Counter(outcome.verdict.split(":")[0] for outcome in outcomes.values())
    stops = [seconds for outcome in outcomes.values() for seconds in outcome.stops] or [0.0]
    rows = [
        [number, outcome.starts, " ".join(f"{seconds:.1f}" for seconds in outcome.stops), outcome.verdict]
        for number, outcome in outcomes.items()
    ]
    parts = [
        "# Runs that have bad days",
        f"    {command}",
        f"{len(outcomes)} scenarios: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())),
        "Each line is a run that was started and disturbed as it says, on processes x devices of each, and then "
        f"started once more and left to finish. The unbroken run is {UNBROKEN}. Equal: its metrics but for times, its "
        "parameters and the state of its optimizer are those of the unbroken run to the last bit, no metric is there "
        "twice or missing, no process is left, and no file but those of a run. Stopped after: seconds from the "
        f"disturbance to the end of the last process, {statistics.median(stops):.1f} in the median, {max(stops):.1f} "
        "at most (a process that is lost is noticed after 20 s).",
        plain_table(["seed", "disturbed by", "stopped after, s", "verdict"], "rlrl", rows),
    ]
    return "\n\n".join(parts) + "\n"


def drill(
    work_dir: Path,
    arguments: Sequence[str],
    steps: int,
    seeds: Sequence[int],
    *,
    at_once: int = 1,
    most_starts: int = 3,
    done: Callable[[int, Outcome], None] = lambda seed, outcome: None,
) -> dict[int, Outcome]:
    """The unbroken run, then all scenarios, each with a seed of its own, and `at_once` of them side by side.

    Args:
      done: is told of each, in their order.
    """
    unbroken = work_dir / "unbroken"
    with Job(unbroken, arguments, UNBROKEN) as job:
        _require(set(job.wait(300)) == {0}, "the unbroken run failed", job)

    def one(seed: int) -> tuple[int, Outcome]:
        run_dir = work_dir / f"scenario_{seed}"
        outcome = play(run_dir, unbroken, arguments, steps, random.Random(seed), most_starts)
        shutil.rmtree(run_dir, ignore_errors=True)
        return seed, outcome

    outcomes = {}
    with ThreadPoolExecutor(at_once) as pool:
        for seed, outcome in pool.map(one, seeds):
            outcomes[seed] = outcome
            done(seed, outcome)
    return outcomes


class Log:
    """The outcomes so far, in a file that the same command goes on with after an interruption.

    Args:
      path: without its suffix.
      params: the bindings of the runs.

    Raises:
      ConfigError: the file is of other runs.
    """

    def __init__(self, path: Path, params: Sequence[str]):
        self._path, self._params = path, list(params)
        self.outcomes: dict[int, Outcome] = {}
        path.parent.mkdir(parents=True, exist_ok=True)  # now, not after the first scenario
        if path.with_suffix(".json").exists():
            held = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            if held["params"] != self._params:
                raise ConfigError(f"--output={path}: its log is of other runs ({held['params']}); take another one")
            self.outcomes = {int(seed): Outcome(**outcome) for seed, outcome in held["outcomes"].items()}

    def add(self, seed: int, outcome: Outcome) -> None:
        """Notes, prints and writes one more."""
        self.outcomes[seed] = outcome
        print(f"{seed}: {outcome.starts}: {outcome.verdict}\n{outcome.detail}".rstrip(), flush=True)
        held = {"params": self._params, "outcomes": {seed: one._asdict() for seed, one in self.outcomes.items()}}
        write_whole(self._path.with_suffix(".json"), json.dumps(held, indent=1) + "\n")
        write_whole(self._path.with_suffix(".md"), report(command_line("experiments.drill"), self.outcomes))


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_string("gin_file", "quickstart.gin", "The experiment.")
    flags.DEFINE_multi_string("gin_param", [], "One more binding; repeat it.")
    flags.DEFINE_integer("steps", 24, "Steps of every run.", lower_bound=8)
    flags.DEFINE_integer("scenarios", 100, "How many runs are disturbed.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the first scenario; those after it have the next ones.", lower_bound=0)
    flags.DEFINE_integer("at_once", 1, "Scenarios side by side.", lower_bound=1)
    flags.DEFINE_string("output", None, "Path of the log, without its suffix.", required=True)


def main() -> int:
    every = FLAGS.steps // 4
    params = [
        "TrainingConfig.log_every = 1",
        *(f"TrainingConfig.{field} = {every}" for field in ("eval_every", "checkpoint_every")),
        f"TrainingConfig.steps = {FLAGS.steps}",
        "TrainingConfig.batch_size = 8",
        *FLAGS.gin_param,
    ]
    experiment = load_experiment([FLAGS.gin_file], params)
    log, seeds = Log(Path(FLAGS.output), params), range(FLAGS.seed, FLAGS.seed + FLAGS.scenarios)
    ensure_prepared(experiment.data)
    arguments = [f"--gin_file={FLAGS.gin_file}", *(f"--gin_param={param}" for param in params)]
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    left = [seed for seed in seeds if seed not in log.outcomes]
    with tempfile.TemporaryDirectory(prefix="drill.") as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(folder) / "cache"))  # a layout is compiled once
        drill(Path(folder), arguments, FLAGS.steps, left, at_once=FLAGS.at_once, done=log.add)
    return int(any(outcome.verdict.startswith("FAILED") for outcome in log.outcomes.values()))


if __name__ == "__main__":
    start(define_flags, main)
