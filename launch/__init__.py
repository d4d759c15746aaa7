"""Programs: `python -m launch.NAME`, or `aamoe NAME`."""

import importlib.util
import sys

if importlib.util.find_spec("absl") is None:
    sys.exit(f"error: {sys.executable} has no absl-py: activate the environment of aamoe_jax (. .venv/bin/activate)")
