"""The exception for errors in the data that a user can fix."""

from aamoe_jax.config import ConfigError


class DataError(ConfigError):
    """Data that is missing or unfit. The message names it and says what to do next."""
