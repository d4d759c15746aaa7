"""The exception for errors in the data that a user can fix."""

from aamoe_jax.config import ConfigError


class DataError(ConfigError):
    """Data that is missing or unfit. The message names it and says what to do next."""


def shown(value: object, most: int = 160) -> str:
    """A text of unknown origin as part of a message: on one line, of at most `most` characters."""
    text = " ".join(str(value).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= most else f"{text[: most - 3]}..."
