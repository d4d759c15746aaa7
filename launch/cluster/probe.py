"""Is this host fit to run a job? Every launcher asks each host before the job starts.

    python -m launch.cluster.probe --devices=4 --run_dir=/mnt/shared/runs/mine --min_free_gib=20

Prints one line for all that is well, or one `unhealthy NODE: ...` line for each thing that is not, and ends with exit
code 0 or 6. It needs nothing but Python itself, 3.7 or newer: a host that lacks the rest must be able to say so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys

UNHEALTHY = 6  # of launch.cluster.exits, which an old Python could not import
OLDEST = (3, 11)  # as setup.cfg has it
GIB = 2**30
# The hosts of a TPU slice open it together, and their pods start when their images are there.
PATIENCE = 900
# In a process of its own: a broken accelerator hangs rather than fails.
COUNT = "import jax, aamoe_jax; print(jax.local_device_count())"


def python_trouble():
    """What is wrong with the interpreter, or None."""
    if sys.version_info < OLDEST:
        return f"Python {python_version()}; 3.11 or newer is needed: set --python"
    return None


def device_trouble(devices, patience):
    """What is wrong with the package or the accelerator, or None: imports both and counts `jax.local_devices()`.

    Of one slice: told of several (MEGASCALE_...), it would wait for the hosts of all of them."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MEGASCALE_")}
    command = [sys.executable, "-c", COUNT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, env=alone)
    except subprocess.TimeoutExpired:
        return f"jax.local_devices() did not answer within {patience:g} s"
    if done.returncode:
        return f"jax or aamoe_jax does not start: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
    found = int(done.stdout.split()[-1])
    if found != devices:
        return f"{found} devices; {devices} were expected"
    return None


def folder_trouble(folder, min_free_gib):
    """What is wrong with the run folder, or None: it is made if missing, written to, read back, and its disk is
    measured."""
    if folder.startswith("gs://"):
        return bucket_trouble(folder)
    marker = os.path.join(folder, f".probe-{node_name()}-{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(marker, "w") as file:
            file.write(marker)
        with open(marker) as file:
            intact = file.read() == marker
        os.remove(marker)
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return f"the run folder {folder} cannot be written: {error.strerror}"
    if not intact:
        return f"the run folder {folder} does not hold what was written"
    if free < min_free_gib:
        return f"{free:.1f} GiB free in {folder}; {min_free_gib:g} are wanted (--min_free_gib)"
    return None


def bucket_trouble(folder):
    """What is wrong with a run folder in a bucket, or None: an object is written, read back and removed."""
    try:
        from aamoe_jax.bucket import location

        marker = location("run_dir", folder) / f".probe-{node_name()}-{os.getpid()}"
        marker.write_text(str(marker))
        intact = marker.read_text() == str(marker)
        marker.unlink()
    except Exception as error:  # a host that lacks all but Python has to say so too
        return f"the run folder {folder} cannot be tried: {error}"
    return None if intact else f"the run folder {folder} does not hold what was written"


def python_version():
    """Such as 3.11.9."""
    return ".".join(map(str, sys.version_info[:3]))


def node_name():
    """What the cluster calls this host: NODE_NAME of a pod, SLURM's name, or the host's own."""
    return os.environ.get("NODE_NAME") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m launch.cluster.probe", description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, required=True, help="JAX devices that this host must have")
    parser.add_argument("--run_dir", required=True, help="folder that must be writable")
    parser.add_argument("--min_free_gib", type=float, default=0, help="GiB that must be free there")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds that the devices may take to answer")
    options = parser.parse_args(argv)
    found = [
        python_trouble(),
        device_trouble(options.devices, options.patience),
        folder_trouble(options.run_dir, options.min_free_gib),
    ]
    troubles = [trouble for trouble in found if trouble is not None]
    for trouble in troubles:
        print(f"unhealthy {node_name()}: {trouble}", flush=True)
    if not troubles:
        print(f"healthy {node_name()}: Python {python_version()}, {options.devices} devices", flush=True)
    return UNHEALTHY if troubles else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
