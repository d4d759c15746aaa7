"""A mixer of your own: an exponential moving average of the tokens so far, channel by channel.

  python -m launch.train --import=examples/my_mixer.py --gin_file=quickstart.gin --run_dir=runs/moving_average \
      --gin_param="ModelConfig.pattern = ('moving_average+feed_forward',)" \
      --gin_param='MovingAverageConfig.half_life = 8.0'
  python -m launch.generate --checkpoint=runs/moving_average --prompt='def '

It decodes by computing rows again, and its FLOPs are two per parameter: `empty_cache`, `fill`, `decode` and `costs` of
aamoe_jax/mixers/base.py say better. `aamoe_jax.check_mixer('moving_average')` holds it to what stacks need.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from aamoe_jax import ConfigError, Mixer, register
from aamoe_jax.layers import Projection, residual_gain


@dataclasses.dataclass(frozen=True)
class MovingAverageConfig:
    """The moving average."""

    half_life: float = 4.0
    """Tokens after which a token counts half as much, before training."""

    def __post_init__(self):
        if self.half_life <= 0:
            raise ConfigError(f"MovingAverageConfig.half_life = {self.half_life}: must be above 0")


@register("moving_average", "an exponential moving average of earlier tokens", config=MovingAverageConfig)
class MovingAverage(Mixer):
    """y_i = a y_{i-1} + (1 - a) W x_i within a document, and a projection; a in (0, 1) is learned for every channel."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        d, axes, decay = config.d_model, ("storage", None), 0.5 ** (1 / config.of(MovingAverageConfig).half_life)
        self.value = Projection(d, d, axes=axes, rngs=rngs)
        self.output = Projection(d, d, axes=axes, rngs=rngs, gain=residual_gain(config))
        self.logit = nnx.Param(jnp.full(d, jnp.log(decay / (1 - decay))), axes=(None,))

    def __call__(self, h, context):
        h = context.move(h, "here", "rows")  # over a mesh h holds the tokens of this device alone
        decay = jax.nn.sigmoid(self.logit[...])
        continues = (context.positions > 0)[..., None]  # 0 starts a document
        steps = jnp.where(continues, decay, 0.0), (1 - decay) * self.value(h)
        _, average = jax.lax.associative_scan(lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1]), steps, axis=1)
        return context.move(self.output(average.astype(h.dtype)), "rows", "here"), {}
