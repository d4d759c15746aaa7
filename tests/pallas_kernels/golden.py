"""What a TPU's compiler makes of all that lies around the attention kernels: `python -m tests.pallas_kernels.golden`
notes it."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path

from benchmarks.compiled_layer import bundles_around_kernels
from pallas_kernels import aot

FILE = Path(__file__).with_name("golden.json")
COMMAND = "python -m tests.pallas_kernels.golden"
CASE = "tests.pallas_kernels.chip_cases:attention"
SHAPE = {"tokens": 1024, "heads": 8, "d": 128, "m": 128, "experts": 8, "rows": 512}
CHIP = "v5e"


def main() -> None:
    """Writes the golden file."""
    with tempfile.TemporaryDirectory() as root:
        aot.compile_apart(CHIP, CASE, SHAPE, dump_to=Path(root, "dump"))
        bundles = bundles_around_kernels(Path(root, "dump"))
    record = {"libtpu": importlib.metadata.version("libtpu"), "command": COMMAND, "bundles_around_kernels": bundles}
    FILE.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
