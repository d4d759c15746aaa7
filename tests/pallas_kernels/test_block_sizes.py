"""Block sizes: they change how the work is cut and nothing else; and the search for better ones."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot, chips, tune
from pallas_kernels.block_sparse_attention import BlockSizes, block_sparse_attention, interface
from pallas_kernels.tune import Result
from tests.pallas_kernels.base import assert_close
from tests.pallas_kernels.cases import Shape, evaluate, random_inputs

SMALL = tune.Shape(tokens=256, heads=2, head_size=16, keys=32, experts=4, pairs=3, dtype="float32")
OTHERS = {
    "xla": BlockSizes(pairs=5, tiles=3),
    "pallas_tpu_resident": BlockSizes(pairs=256, tokens=16),
    "pallas_tpu_gathered": BlockSizes(pairs=256),
    "pallas_tpu_dense": BlockSizes(tokens=256, keys=16),
    "pallas_gpu": BlockSizes(keys=64, tiles=1),
}


@pytest.mark.parametrize("implementation", sorted({*OTHERS} - {"pallas_tpu_resident"}))
def test_other_sizes_give_the_same_attention_and_gradients(implementation):
    """Those of `resident` have tests beside its others."""
    inputs, static = random_inputs(Shape(tokens=40, m=8, num_context=5, slots=3, bounded=True))
    with chips.assume("h200" if implementation == "pallas_gpu" else "v5e"):
        found = evaluate(inputs, static._replace(block_sizes=OTHERS[implementation]), implementation)
    wanted = evaluate(inputs, static, "reference")
    for ours, theirs in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        assert_close(ours, theirs, 1e-5, implementation)


@pytest.mark.parametrize("implementation", OTHERS)
def test_a_path_has_the_sizes_that_it_was_given(implementation):
    problem = tune.Shape().problem
    of_long_rows = {"pallas_tpu_dense": BlockSizes(tokens=256, keys=256), "pallas_tpu_gathered": BlockSizes(pairs=512)}
    wanted = of_long_rows.get(implementation, OTHERS[implementation])
    default = interface.plan(implementation, problem(BlockSizes())).block_sizes
    found = interface.plan(implementation, problem(wanted)).block_sizes
    assert found == wanted != default
    assert set(default.given()) == set(wanted.given())


@pytest.mark.parametrize(
    ("implementation", "sizes", "message"),
    [
        (
            "pallas_tpu_resident",
            {"keys": 512},
            r"block_sizes\.keys=512: .*'pallas_tpu_resident' has pairs and tokens al",
        ),
        ("pallas_tpu_resident", {"pairs": 100}, r"block_sizes\.pairs=100; wanted a multiple of 128"),
        ("pallas_tpu_resident", {"tokens": 10**6}, r"block_sizes\.tokens=1000000; fast memory holds \d+ tokens"),
        ("pallas_tpu_gathered", {"pairs": 64}, r"block_sizes\.pairs=64; wanted a multiple of 128"),
        ("pallas_tpu_dense", {"tokens": 100}, r"block_sizes\.tokens=100; wanted a multiple of 128"),
        ("pallas_tpu_dense", {"keys": 100}, r"block_sizes\.keys=100; wanted a multiple of 16"),
        ("pallas_gpu", {"keys": 100}, r"block_sizes\.keys=100; wanted 64"),
        ("pallas_tpu", {"pairs": 128}, r"wanted implementation= to name whose they are: xla, "),
        (None, {"pairs": 128}, r"wanted implementation= to name whose they are"),
    ],
)
def test_a_size_that_cannot_be_is_refused(implementation, sizes, message):
    inputs, static = random_inputs(Shape())
    static = static._replace(block_sizes=BlockSizes(**sizes))
    with chips.assume("h200" if implementation == "pallas_gpu" else "v5e"), pytest.raises(ValueError, match=message):
        block_sparse_attention(*inputs[:5], implementation=implementation, **static._asdict())


@pytest.mark.parametrize("size", [0, -1, True])
def test_a_size_is_a_positive_integer(size):
    with pytest.raises(ValueError, match=r"block_sizes\.pairs=.*; wanted a positive integer, or None"):
        BlockSizes(pairs=size)


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu_resident", "pallas_tpu_dense"])
def test_candidates_begin_with_the_default_and_are_all_taken(implementation):
    found = tune.candidates(implementation, tune.Shape())
    assert found[0] == interface.plan(implementation, tune.Shape().problem(BlockSizes())).block_sizes
    assert len(found) == len(set(found)) > 3
    for sizes in found:
        assert interface.plan(implementation, tune.Shape().problem(sizes)).block_sizes == sizes


def test_candidates_are_timed_and_those_that_cannot_be_say_why(monkeypatch):
    sizes = [BlockSizes(pairs=16, tiles=4), BlockSizes(pairs=16, keys=4), BlockSizes(pairs=64, tiles=1)]
    first, third, second = tune.by_time("xla", SMALL, sizes, rounds=2)
    assert [first.block_sizes, second.block_sizes, third.block_sizes] == sizes
    assert first.milliseconds > 0 < third.milliseconds
    assert second.milliseconds is None
    assert "implementation='xla' has pairs and tiles" in second.refused
    with pytest.raises(ValueError, match="'pallas_tpu_dense' is interpreted on a cpu: name a chip"):
        tune.by_time("pallas_tpu_dense", SMALL, sizes)


def test_kernels_that_the_gpu_here_does_not_get_are_not_timed(monkeypatch):
    sizes = [BlockSizes(keys=64)]
    with pytest.raises(ValueError, match="implementation='pallas_gpu' needs a Hopper GPU"):
        tune.by_time("pallas_gpu", SMALL, sizes)
    monkeypatch.setattr(chips, "takes_gpu_kernels", lambda wanted: False)
    with pytest.raises(ValueError, match=r"^implementation='pallas_gpu' gets 'xla' here: nothing to tune$"):
        tune.by_time("pallas_gpu", SMALL, sizes)


@pytest.mark.parametrize("implementation", tune.SCHEDULED)
def test_the_kernels_of_both_passes_are_compiled_each_alone(implementation):
    kernels, shapes = tune.case("v5e", implementation, vars(SMALL), {})
    calls = list(tune.kernel_calls(jax.make_jaxpr(kernels)(*shapes).jaxpr))
    assert tuple(call.params["name"] for call in calls) == tune.SCHEDULED[implementation]


def test_a_schedule_is_weighed_by_how_full_its_tiles_are(monkeypatch):
    """At equal bundles a pair smaller tiles win, whose last one is less empty; a large one can make up for it."""
    monkeypatch.setattr(aot, "require_compiler", lambda chip: None)
    asked = []

    def compiled(chip, implementation, shape, sizes, pairs):
        asked.append((sizes, pairs))
        return {128: 10.0, 256: 10.0, 512: 4.0}[sizes.pairs]

    monkeypatch.setattr(tune, "nanoseconds_a_pair", compiled)
    sizes = [BlockSizes(pairs=pairs, tokens=tokens) for pairs in (128, 256, 512) for tokens in (4096, 8192)]
    found = {result.block_sizes: result.milliseconds for result in tune.by_schedule("v5e", *CHOSEN, sizes)}
    times = [found[one] for one in sizes]
    assert times[1] < times[3] > times[5]
    assert all(times[i] > times[i + 1] for i in (0, 2, 4))  # two windows meet resources twice
    assert asked == [(BlockSizes(pairs=pairs), pairs) for pairs in (128, 256, 512)]  # the kernel is the same for both
    with pytest.raises(ValueError, match="'pallas_tpu_gathered' has no schedule; wanted one of pallas_tpu_resident"):
        tune.by_schedule("v5e", "pallas_tpu_gathered", tune.Shape(), sizes)


CHOSEN = "pallas_tpu_resident", tune.Shape()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("RESOURCE_EXHAUSTED: vmem\nmore", "RESOURCE_EXHAUSTED: vmem"),
        ("\n later", "later"),
        ("", "no reason is given"),
    ],
)
def test_what_the_compiler_refuses_is_named(monkeypatch, words, reason):
    def refuse(chip, *arguments):
        raise aot.CompileError(f"a case for {chip}: {words}")

    monkeypatch.setattr(aot, "require_compiler", lambda chip: None)
    monkeypatch.setattr(tune, "nanoseconds_a_pair", refuse)
    sizes = [BlockSizes(pairs=128, tokens=8192)]
    assert tune.by_schedule("v5e", *CHOSEN, sizes) == [Result(sizes[0], None, reason)]


def test_an_error_without_words_is_no_other_error(monkeypatch):
    def refuse(*arguments):
        raise ValueError

    monkeypatch.setattr(tune, "both_passes", refuse)
    sizes = [BlockSizes(pairs=16)]
    assert tune.by_time("xla", SMALL, sizes) == [Result(sizes[0], None, "no reason is given")]


def test_the_default_wins_over_its_equals():
    rows = [{"block_sizes": {"pairs": n}, "milliseconds": time, "refused": "x"} for n, time in ((2, 3.0), (1, 3.0))]
    assert tune.best_of(rows)["block_sizes"] == {"pairs": 2}
    rows[1]["milliseconds"] = 2.0
    assert tune.best_of(rows)["block_sizes"] == {"pairs": 1}
    with pytest.raises(ValueError, match="no candidate can be computed: x"):
        tune.best_of([{"milliseconds": None, "refused": "x"}])


def test_the_program_writes_what_it_found(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "STEPS", (1.0,))
    path = tmp_path / "found.json"
    sizes = [f"--{name}={value}" for name, value in vars(SMALL).items()]
    monkeypatch.setattr(sys, "argv", ["tune", "--implementation=xla", "--rounds=1", f"--output={path}", *sizes])
    tune.main()
    record = json.loads(path.read_text())
    assert record["shape"] == vars(SMALL)
    (only,) = record["results"]
    pairs, tiles = only["block_sizes"].values()
    assert f"block_sizes=BlockSizes(pairs={pairs}, tiles={tiles})" in capsys.readouterr().out
    assert path.with_suffix(".md").read_text().startswith("# Block sizes of xla")
    monkeypatch.setattr(sys, "argv", ["tune", "--implementation=x"])
    with pytest.raises(SystemExit, match="error: --implementation=x: there are xla, "):
        tune.main()


def test_without_the_compiler_the_program_says_what_to_install(monkeypatch):
    monkeypatch.setattr(aot, "_installed", lambda module: False)
    monkeypatch.setattr(sys, "argv", ["tune", "--implementation=pallas_tpu_resident", "--chip=v5e"])
    with pytest.raises(SystemExit, match=r"^error: libtpu is not installed; .*: pip install -e '\.\[aot\]'"):
        tune.main()


def test_a_place_to_write_is_there_before_anything_is_computed(monkeypatch, tmp_path):
    computed = []

    def tuned(*_):
        computed.append((tmp_path / "deep" / "folder").is_dir())
        raise ValueError("enough")

    monkeypatch.setattr(tune, "tuned", tuned)
    (tmp_path / "file").touch()
    for output, message in (
        (tmp_path / "file" / "x.json", r"--output=.*x\.json: its folder cannot be made: "),
        (tmp_path, r"--output=.* is a folder; wanted a file"),
        (tmp_path / "deep" / "folder" / "x.json", "enough"),
    ):
        monkeypatch.setattr(sys, "argv", ["tune", "--implementation=xla", f"--output={output}"])
        with pytest.raises(SystemExit, match=f"^error: {message}"):
            tune.main()
    assert computed == [True]


def test_scores_of_the_tuned_inputs_are_bounded_as_they_say():
    query, _, key, *_, max_score = tune.arguments(SMALL)
    scores = SMALL.head_size**-0.5 * jnp.einsum("thd,rmhd->trmh", query, key)
    assert float(jnp.abs(scores).max()) <= float(max_score)
