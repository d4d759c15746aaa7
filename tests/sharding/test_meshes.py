"""One model on meshes of 8 devices, and over real processes: the same loss, the same gradients, what is sent."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from aamoe_jax.registry import MIXERS
from benchmarks.meshes import factorizations

pytestmark = pytest.mark.distributed
ALL = ["x".join(map(str, sizes)) for sizes in factorizations(8)]
MESHES = ("8x1x1x1", "1x2x2x2", "1x8x1x1", "2x1x2x2", "1x1x8x1", "2x2x1x2", "1x1x1x8", "2x2x2x1")
"""Every axis alone, and every three of them. `python -m benchmarks.meshes` takes all twenty, and many minutes."""
PARTS = (MESHES[:4], MESHES[4:])
"""Each in a process of its own, so that they run side by side."""
TOLERANCE = 1e-5


def on_meshes(tmp_path, meshes: Sequence[str], *bindings: str) -> list[dict]:
    """The rows of `benchmarks.meshes`."""
    output = tmp_path / "meshes.json"
    command = [sys.executable, "-m", "benchmarks.meshes", f"--meshes={','.join(meshes)}", f"--output={output}"]
    command += [f"--gin_param={binding}" for binding in bindings]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | cache(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(output.read_text())["rows"]


def cache(tmp_path: Path) -> dict[str, str]:
    """What all tests of one worker compile alike, they compile once."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
    }


def assert_same(rows: Sequence[dict], loss: float = TOLERANCE, gradient: float = TOLERANCE) -> None:
    """Loss and gradients to float32, how many resources of each kind were given to the last one."""
    for row in rows:
        assert row["loss"] < loss, row
        assert row["gradient"] < gradient, row
        assert row["pairs"] == 0, row
        assert row["mass"] < (1e-6 if row["mesh"][2] == 1 else 0.01), row
        assert row["overflow"] == 0, row


class TestEveryAxis:
    def test_there_are_twenty_meshes(self):
        assert len(ALL) == len(set(ALL)) == 20
        assert set(MESHES) < set(ALL)

    @pytest.mark.parametrize("meshes", PARTS, ids=",".join)
    def test_loss_and_gradients_are_those_of_one_device(self, tmp_path, meshes):
        rows = on_meshes(tmp_path, meshes)
        assert tuple("x".join(map(str, row["mesh"])) for row in rows) == meshes
        assert_same(rows)


def test_slices_are_a_mesh_too(tmp_path):
    assert_same(on_meshes(tmp_path, ["2x2x2x1", "4x1x1x2"], "MeshConfig.slices = 2"))


STACKS = {
    "row budgets": ("aamoe+mixture_of_depths",),
    "beside dense mixers": (
        "aamoe",
        "all_attention+mixture_of_depths",
        "parallel+swiglu+sqrt_attention+gated_attention+filtered_attention+clustered_attention+convolved_attention",
    ),
    "deconstructed": ("mlp+approximate+non_approximate+static_qk+random_qk+fixed_qk",),
    "experts": ("moe+switch+relu_moe",),
    "grouped": (
        "aamoe+attention+all_attention+local_attention+strided_attention+sink_attention+filtered_attention",
        "feed_forward",
    ),
}


def stack(name: str) -> tuple[str, str]:
    """The bindings of a stack."""
    layers = STACKS[name]
    return f"ModelConfig.pattern = {layers!r}", f"ModelConfig.num_layers = {len(layers)}"


class TestEveryKindOfLayer:
    """What these meshes do not try: other readings of local context, budgets, mixers, memory, micro-batches."""

    MESHES = ("1x2x2x2",)

    def test_every_mixer_is_in_one(self):
        layers = [layer for stack in STACKS.values() for layer in stack]
        assert {name for layer in layers for name in layer.split("+")} == set(MIXERS)

    def test_groups_of_heads_and_static_selections(self, tmp_path):
        bindings = (
            "ModelConfig.num_kv_heads = 4",
            "SparseAttentionConfig.window = 24",
            "FilteredAttentionConfig.filter = 'message_norm'",
            "FilteredAttentionConfig.threshold = 1.0",
        )
        assert_same(on_meshes(tmp_path, self.MESHES, *stack("grouped"), *bindings))

    @pytest.mark.parametrize("local", ["window", "none"])
    def test_pooled_keys(self, tmp_path, local):
        """Heads are divided over `tensor`, chunks and experts over `resource`: all have a say in every choice."""
        bindings = ("router = 'pooled'", f"local = {local!r}", "key_convolution = True", "query_convolution = True")
        assert_same(on_meshes(tmp_path, self.MESHES, *(f"AAMoEConfig.{binding}" for binding in bindings)))

    def test_no_experts_no_local_resource_a_null_slot_and_recomputation(self, tmp_path):
        bindings = ("AAMoEConfig.local = 'none'", "AAMoEConfig.null_slot = 'learned'", "ModelConfig.remat = 'full'")
        assert_same(on_meshes(tmp_path, self.MESHES, "AAMoEConfig.num_experts = 0", *bindings))

    def test_own_chunk_row_budgets_with_a_predictor_and_micro_batches(self, tmp_path):
        bindings = (
            "AAMoEConfig.local = 'chunk'",
            "BudgetConfig.normalizer = 'row'",
            "BudgetConfig.expert_share = 0.5",
            "AAMoEConfig.signal = 'separate'",
            "TrainingConfig.accumulate = 2",
            "ModelConfig.remat = 'dots'",
        )
        assert_same(on_meshes(tmp_path, self.MESHES, *stack("row budgets"), *bindings))

    def test_routed_own_chunk_beside_dense_mixers(self, tmp_path):
        bindings = (
            "AAMoEConfig.local = 'routed'",
            "AAMoEConfig.router_input = 'causal_conv'",
            "AAMoEConfig.expert_router = 'attention'",
            "AAMoEConfig.max_resources = 3",
            "BudgetConfig.distance_price = 0.3",
            "BudgetConfig.expert_price = 1.5",
            "BudgetConfig.load_price = 0.5",
            "AAMoEConfig.expert_gate = True",
            "ModelConfig.embedding = 'tied'",
        )
        assert_same(on_meshes(tmp_path, self.MESHES, *stack("beside dense mixers"), *bindings))

    def test_attention_deconstructed(self, tmp_path):
        assert_same(on_meshes(tmp_path, self.MESHES, *stack("deconstructed")))

    def test_experts(self, tmp_path):
        """With their losses, routers that look back across parts of a row, and tokens that find no room. On
        meshes that divide experts by 2 and by 8."""
        bindings = (
            "MoEConfig.router = 'attention'",
            "MoEConfig.router_input = 'causal_conv'",
            "MoEConfig.capacity_tokens = 16",
            "TrainingConfig.accumulate = 2",
        )
        assert_same(on_meshes(tmp_path, ("1x1x8x1", *self.MESHES), *stack("experts"), *bindings))

    def test_experts_choose_alike_in_bfloat16(self, tmp_path):
        """Scores are of float32, and what `tensor` divides is rounded when its sum is whole."""
        rows = on_meshes(
            tmp_path, ("1x1x8x1", "1x1x2x4", "1x2x2x2"), *stack("experts"), "ModelConfig.dtype = 'bfloat16'"
        )
        for row in rows:
            assert row["pairs"] == 0, row
            assert row["loss"] < 1e-4, row
            assert row["gradient"] < 0.02, row

    def test_no_context_and_no_bias(self, tmp_path):
        bindings = ("AAMoEConfig.context = 'none'", "AAMoEConfig.bias = 'none'")
        assert_same(on_meshes(tmp_path, ("1x1x4x2",), *bindings))

    def test_bfloat16(self, tmp_path):
        """Sums over devices are of other parts, each rounded: a few close choices fall otherwise, and gradients of what
        they were between with them. Without choices, of which a ReLU makes one for every hidden unit, gradients differ
        by a few units of rounding (2^-8)."""
        half = "ModelConfig.dtype = 'bfloat16'"
        (routed,) = on_meshes(tmp_path, self.MESHES, half)
        assert routed["loss"] < 1e-3
        assert routed["pairs"] < 10  # of some 2,000 in a layer
        (dense,) = on_meshes(tmp_path, self.MESHES, half, "ModelConfig.pattern = ('attention+swiglu',)")
        assert dense["loss"] < 1e-3
        assert dense["gradient"] < 0.05


class TestPairBound:
    def test_what_is_past_it_is_counted(self, tmp_path):
        bindings = ("MeshConfig.pair_bound = 1.0", "AAMoEConfig.local = 'none'", "BudgetConfig.slack = 0")
        # Uniform budgets spend all there is: the shares of shards, which differ a little, are then past the even one.
        bindings += ("BudgetConfig.beta = 6.0", "BudgetConfig.importance = 'uniform'")
        (tight,) = on_meshes(tmp_path, ("2x1x4x1",), *bindings)
        assert tight["overflow"] > 0
        assert TOLERANCE < tight["loss"] < 0.1  # something was dropped, and nothing broke


@pytest.fixture(scope="module")
def sent(tmp_path_factory) -> dict[str, dict]:
    command = [sys.executable, "-m", "tests.sharding.sent"]
    env = os.environ | cache(tmp_path_factory.mktemp("sent"))
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


class TestWhatIsSent:
    """Collectives as the compiler wrote them, from two models that differ in sizes."""

    def test_of_experts_only_router_embeddings_travel_and_looking_up_an_embedding_sends_nothing(self, sent):
        """64 experts and 192 words more: of these, what travels is a number per expert and column of W_c."""
        small, large = sent["1x1x4x2"], sent["1x1x4x2, more experts and words"]
        layers, width, bytes_each, shards = 2, 32, 4, 4
        embeddings = layers * (80 - 16) * width * bytes_each * (shards - 1) / shards
        assert small.keys() == large.keys()
        gradients = ("all-reduce tensor", "all-reduce resource+tensor")  # of embeddings, of the table and the readout
        for name, (count, size) in small.items():
            if name in ("all-gather resource", "reduce-scatter resource"):
                assert large[name] == [count, size + embeddings]
            elif name in gradients:
                assert large[name][0] == count
            else:
                assert large[name] == [count, size], name

    def test_the_table_is_gathered_from_where_it_is_stored_like_any_parameter(self, sent):
        small, large = sent["1x4x1x2"]["all-gather fsdp"], sent["1x4x1x2, more words"]["all-gather fsdp"]
        tables, width, bytes_each, parts = 2, 32, 4, 4
        assert large[0] == small[0]
        assert large[1] - small[1] == tables * (256 - 64) * width * bytes_each * (parts - 1) / parts

    def test_collectives_of_a_layer_are_those_of_the_design(self, sent):
        two, four = ({name: count for name, (count, _) in sent[key].items()} for key in ("1x2x2x2", "1x2x2x2, deeper"))
        assert {name: (four[name] - two[name]) / 2 for name in four} == PER_LAYER

    def test_tokens_of_experts_travel_and_experts_do_not(self, sent):
        """A layer with 2 of 8 experts a token, 8 rows of 128 tokens on 4 shards of `resource`, each with all rows."""
        whole, half = sent["1x1x4x2, experts"], sent["1x1x4x2, experts with a capacity"]
        tokens, shards, width, bytes_each = 8 * 128 // 4, 4, 32, 4
        # There and back, and their gradients: x, y; the expert and the weight of each, and the weight's gradient.
        of_a_pair = bytes_each * (4 * width + 3)
        for found, room in ((whole, 2 * tokens), (half, tokens // 2)):  # both on one shard; the even share
            assert found["all-to-all resource"] == [7, (shards - 1) * room * of_a_pair]
            # Of the loss that balances them: how many tokens of each row want each of the 8 experts.
            assert found["all-gather resource"] == [1, 8 * 8 * bytes_each * (shards - 1)]
            assert "reduce-scatter resource" not in found


PER_LAYER = {
    # Forward: ends of chunks, router embeddings, queries. Backward: the gradient of what all shards found.
    "all-gather resource": 4,
    # Forward: what all shards found, attention mass. Backward: ends, router embeddings, queries.
    "reduce-scatter resource": 5,
    # Forward: the largest score, the sum of weights. Backward: that sum.
    "all-reduce resource": 3,
    # Keys and values to the shards that keep them, and their gradients back.
    "all-to-all resource": 4,
    # Keys and values at the end of the part before, for the window; and their gradients back.
    "collective-permute resource": 4,
    # One number of every token, for budgets; index, bias and count of what was given. (What a token can have at most
    # depends on no layer.)
    "all-gather resource+tensor": 4,
    # Gradients of that number, and of the bias.
    "reduce-scatter resource+tensor": 2,
    # Forward: h. Backward: the gradient of the output.
    "all-gather tensor": 2,
    # Forward: output, attention mass. Backward: h.
    "reduce-scatter tensor": 3,
    # W^Q, W^K, W^V, W^O, keys and values of experts, W_c, router embeddings; and their gradients.
    "all-gather fsdp": 8,
    "reduce-scatter fsdp": 8,
    # Gradients of parameters over the devices that share them: once per step, for all layers together.
    "all-reduce resource+tensor": 0,
    "all-reduce tensor": 0,
    "all-reduce fsdp+resource+tensor": 0,
}


class TestProcesses:
    @pytest.mark.parametrize(("processes", "devices", "mesh"), [(2, 4, "1x2x4x1"), (4, 2, "2x1x2x2")])
    def test_loss_and_gradients_over_real_processes(self, tmp_path, processes, devices, mesh):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        program = [sys.executable, "-m", "tests.sharding.processes", str(port), str(processes)]
        running = [
            subprocess.Popen(
                [*program, str(index), str(devices), mesh],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | cache(tmp_path),
            )
            for index in range(processes)
        ]
        try:
            ends = [process.communicate(timeout=600) for process in running]
        finally:
            for process in running:
                process.kill()
        for process, (_, errors) in zip(running, ends, strict=True):
            assert process.returncode == 0, errors[-3000:]
        row = json.loads(ends[0][0].splitlines()[-1])
        assert row["devices"] == 8
        assert_same([row])
