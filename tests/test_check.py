"""`check_mixer` passes what works, the example among it, and says what does not."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from aamoe_jax.check import MixerError, check_mixer
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.extensions import import_mixers
from aamoe_jax.layers import Projection
from aamoe_jax.mixers.base import Mixer
from aamoe_jax.mixers.build import costs
from aamoe_jax.mixers.costs import Setting
from aamoe_jax.registry import MIXERS, register
from aamoe_jax.shards import TOKENS

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_mixer.py"


class Average(Mixer):
    """W times the mean over those tokens that `seen` lets a token see."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.value = Projection(config.d_model, config.d_model, axes=("storage", None), rngs=rngs)

    def seen(self, context):
        """[b, L, L]: the tokens of the same document up to the token itself."""
        same = context.segment_ids[:, :, None] == context.segment_ids[:, None, :]
        return same & jnp.tril(jnp.ones(same.shape[1:], bool))

    def __call__(self, h, context):
        h = context.shards.gather(h, TOKENS)
        seen = self.seen(context).astype(h.dtype)
        mean = seen @ self.value(h) / seen.sum(-1, keepdims=True)
        return context.shards.part(mean, TOKENS), {}


class Clairvoyant(Average):
    """It sees the token after."""

    def seen(self, context):
        return super().seen(context) | jnp.eye(context.segment_ids.shape[1], k=1, dtype=bool)


class Nosy(Average):
    """It reads all documents."""

    def seen(self, context):
        return jnp.tril(jnp.ones((len(context.segment_ids), *2 * context.segment_ids.shape[1:]), bool))


class Forgetful(Average):
    """It decodes as if there had been no token before."""

    def decode(self, h, context, cache):
        return self.value(h), cache


class Idle(Average):
    """It has a parameter without use."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.spare = nnx.Param(jnp.ones(3), axes=(None,))


class Steep(Average):
    """Its gradient is infinite."""

    def __call__(self, h, context):
        output, statistics = super().__call__(h, context)
        return output + jnp.sqrt(0.0 * jnp.abs(self.value(h))), statistics


@pytest.fixture
def registered():
    """Registers a class for one test."""
    names = set(MIXERS)
    yield lambda cls: register(cls.__name__.lower(), "for a test")(cls)
    for name in set(MIXERS) - names:
        del MIXERS[name]


@pytest.mark.parametrize(
    ("mixer", "complaint"),
    [
        (Clairvoyant, "clairvoyant is not causal: other tokens from position 1 on change logits before it"),
        (Nosy, "nosy reads other documents: other tokens of the document before change logits"),
        (Forgetful, "forgetful decodes something else: after 1 more tokens, by `decode`, logits differ"),
        (Idle, "idle: the gradient of periods/blocks/0_idle/mixer/spare is 0"),
        (Steep, "steep: the gradient of embedding is not finite"),
    ],
)
def test_what_is_wrong_is_named(mixer, complaint, registered):
    registered(mixer)
    with pytest.raises(MixerError) as caught:
        check_mixer(mixer.__name__.lower())
    assert complaint in str(caught.value)


@pytest.mark.slow
def test_the_example_passes():
    """Its mesh is checked in another process, which imports it too."""
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    import_mixers(str(EXAMPLE))
    check_mixer("moving_average")


@pytest.mark.slow
def test_a_built_in_mixer_passes():
    check_mixer("attention")


@pytest.mark.slow
def test_a_mixer_that_forgets_the_mesh_is_refused(tmp_path):
    """It averages the tokens of its own device: on one device that is right."""
    source = (
        Path(__file__).read_text().split("class Clairvoyant")[0].replace("h = context.shards.gather(h, TOKENS)", "")
    )
    source = source.replace("class Average(Mixer):", '@register("local_average", "wrong")\nclass Average(Mixer):')
    source = source.replace("self.seen(context)", "self.seen(context)[:, : h.shape[1], : h.shape[1]]")
    (tmp_path / "local.py").write_text(source.replace("context.shards.part(mean, TOKENS)", "mean"))
    import_mixers(str(tmp_path / "local.py"))
    try:
        with pytest.raises(
            MixerError, match=r"local_average computes something else on MeshConfig\.resource = 2: .*gather"
        ):
            check_mixer("local_average")
    finally:
        del MIXERS["local_average"]


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="'atention' is no mixer; did you mean 'attention'"):
        check_mixer("atention")


def test_costs_of_a_mixer_that_does_not_say(registered):
    """Two FLOPs for every parameter and token; the row again for every token that is decoded."""
    registered(Average)
    found = costs("average", Setting(ModelConfig(d_model=16, num_heads=2), 3, 10))
    assert found.model_flops == 2 * 16 * 16
    assert found.prefill_flops == 3 * 10 * found.model_flops
    assert found.decode_flops == 3 * 10 * found.model_flops
    assert found.cache_bytes == 3 * 10 * 16 * 4
    assert jnp.isnan(found.activation_bytes)
