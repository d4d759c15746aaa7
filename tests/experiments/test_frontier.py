"""Loss against FLOPs: slopes and gaps that were planted are found, and what is no frontier is refused."""

import json

import numpy as np
import pytest
from PIL import Image

from experiments import frontier
from tests.launch import session

pytestmark = pytest.mark.slow

SIZES = 1e6 * np.array([0.5, 1.0, 2.0, 4.0])
SLOPES = {"a": 0.1, "b": 0.05}
BYTES = np.random.default_rng(0).integers(1_000, 20_000, size=30)


def of_size(flops: float, seeds: int = 1, noise: float = 0.0, names=("a", "b"), corpus: str = "x") -> dict:
    """A report: bits per byte fall by SLOPES with every doubling, and differ by document."""
    results = {}
    for name in names:
        exact = 2.5 - SLOPES.get(name, 0.0) * np.log2(flops / 1e6)
        results[name] = []
        for seed in range(seeds):
            random = np.random.default_rng([seed, len(name), int(flops)])
            of_documents = exact + np.linspace(-0.5, 0.5, 30) + noise * random.normal(size=30)
            nats = of_documents * BYTES * np.log(2)
            results[name].append(
                {
                    "seed": seed,
                    "bits_per_byte": nats.sum() / BYTES.sum() / np.log(2),
                    "documents": np.stack([nats, BYTES], axis=1).tolist(),
                    "evaluation": {"flops_per_token": flops},
                    "corpus_digest": corpus,
                }
            )
    return {"command": "c", "results": results}


def saved(folder, *reports: dict) -> list[str]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{index}.json" for index in range(len(reports))]
    for path, report in zip(paths, reports, strict=True):
        path.write_text(json.dumps(report))
    return [f"--report={path}" for path in paths]


def test_a_planted_slope_is_found():
    for name, planted in SLOPES.items():
        found = frontier.slope([of_size(flops)["results"][name] for flops in SIZES])
        assert found.mean == pytest.approx(planted, abs=1e-12)
        assert found.low == pytest.approx(planted, abs=1e-12)  # all documents have it: nothing is uncertain
        noisy = frontier.slope([of_size(flops, 3, 0.2)["results"][name] for flops in SIZES])
        assert noisy.low < planted < noisy.high
        assert 0.001 < noisy.high - noisy.low < 0.1


def test_seeds_that_differ_widen_the_interval_of_a_slope():
    """Every document of a seed saves as much, and the seeds 0.05, 0.10 and 0.15."""
    sizes = []
    for flops in SIZES:
        runs = of_size(flops, 3)["results"]["a"]
        for run in runs:
            nats, size = np.array(run["documents"]).T
            more = 0.05 * (run["seed"] - 1) * np.log2(flops / 1e6) * np.log(2) * size
            run["documents"] = np.stack([nats - more, size], axis=1).tolist()
        sizes.append(runs[::-1] if flops > 1e6 else runs)  # in any order
    found = frontier.slope(sizes)
    assert found.of_seeds == pytest.approx([0.05, 0.10, 0.15])
    assert (found.low, found.high) == pytest.approx((0.05, 0.15), abs=0.02)
    of_one = frontier.slope([runs[1:2] for runs in sizes])
    assert of_one.low == pytest.approx(of_one.high)
    without = frontier.slope(sizes, sizes)
    assert (without.mean, without.low, without.high) == (0.0, 0.0, 0.0)


def test_the_program_writes_slopes_gaps_and_a_picture(tmp_path):
    sizes = [of_size(flops, 2) for flops in SIZES]
    sizes[0]["results"]["only here"] = sizes[0]["results"]["a"]
    in_any_order = saved(tmp_path, *(sizes[index] for index in (2, 0, 3, 1)))
    (done,) = session.calls("experiments.frontier", [[*in_any_order, f"--output={tmp_path / 'f'}"]])
    assert done.code == 0, done.stderr
    record = json.loads((tmp_path / "f.json").read_text())
    assert [flops for flops, _ in record["points"]["b"]] == SIZES.tolist()
    assert set(record["slopes"]) == {"a", "b"}
    text = (tmp_path / "f.md").read_text()
    assert text == done.stdout
    assert "+0.1000 (+0.1000 to +0.1000)" in text
    # At twice the FLOPs of the size where they meet, b is behind by the difference of the slopes.
    behind = next(line for line in text.splitlines() if line.startswith("| b ") and "2,000,000" in line)
    assert "+0.0500 (+0.0500 to +0.0500)" in behind
    assert Image.open(tmp_path / "f.png").width > 500


def test_reports_of_one_size_are_compared_as_one(tmp_path):
    """Each has a report of its own: `b` half of the FLOPs and a seed less, `c` a seed more."""
    flags = []
    for number, flops in enumerate(SIZES):
        apart = [of_size(flops, 3, names=("a",)), of_size(flops / 2, 2, names=("b",)), of_size(flops, 4, names=("c",))]
        paths = [flag.partition("=")[2] for flag in saved(tmp_path / str(number), *apart)]
        flags.append(f"--report={','.join(paths)}")
    (done,) = session.calls("experiments.frontier", [[*flags, f"--output={tmp_path / 'f'}"]])
    assert done.code == 0, done.stderr
    points = json.loads((tmp_path / "f.json").read_text())["points"]
    assert [flops for flops, _ in points["a"]] == SIZES.tolist()
    assert [flops for flops, _ in points["b"]] == (SIZES / 2).tolist()
    # At 1 and 0.5 MFLOP, 2.5 against 2.5 + 0.05.
    behind = next(line for line in done.stdout.splitlines() if line.startswith("| b ") and " 500,000" in line)
    assert "+0.0500 (+0.0500 to +0.0500)" in behind


def test_what_is_no_frontier_is_refused(tmp_path):
    size = of_size(1e6)
    saved(tmp_path / "twice", size)
    (tmp_path / "no.json").write_text('{"results": 3}')
    other_seed = of_size(2e6)
    for runs in other_seed["results"].values():
        runs[0]["seed"] = 7
    cases = {
        "two sizes or more": saved(tmp_path / "a", size),
        "two reports have a variant 'a'; leave one out": [f"--report={','.join([str(tmp_path / 'twice/0.json')] * 2)}"],
        "no variant is in all": saved(tmp_path / "b", size, of_size(2e6, names=("c",))),
        "different corpora": saved(tmp_path / "c", size, of_size(2e6, corpus="y")),
        "of one size": saved(tmp_path / "d", size, size),
        "no seed is in all": saved(tmp_path / "e", size, other_seed),
        "no report of experiments.studies": [f"--report={tmp_path / 'no.json'}"],
    }
    output = f"--output={tmp_path / 'f'}"
    outcomes = session.calls("experiments.frontier", [[*reports, output] for reports in cases.values()])
    for message, done in zip(cases, outcomes, strict=True):
        assert done.code == 1
        assert message in done.stderr
    assert not (tmp_path / "f.json").exists()
