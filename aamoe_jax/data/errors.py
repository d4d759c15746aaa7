"""The one exception of this room, so that programs can tell what a user can mend from what is a defect."""

from aamoe_jax.config import ConfigError


class DataError(ConfigError):
    """Data that is missing or unfit. The message names it and says what to do next."""
