"""What Orbax says of errors beside raising them."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from typing import Any


@functools.cache
def silence_orbax() -> None:
    """Leaves errors to whoever catches them: Orbax logs the traceback of every error that it also raises.

    When one read or write fails it also abandons the others, and Python would print what becomes of each.
    """
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    # A write that was abandoned is reported once more by asyncio, now or at exit, as an exception nobody retrieved.
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    others = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None if _is_aftermath(unraisable) else others(unraisable)


def _is_aftermath(unraisable: Any) -> bool:
    if inspect.iscoroutine(unraisable.object):
        return "orbax" in unraisable.object.cr_code.co_filename
    return isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
