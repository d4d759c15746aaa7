"""Archives from a mirror that lies in a folder: pinned, unpacked without running anything."""

import hashlib
import io
import tarfile

import pytest

from aamoe_jax.data import DataError, fetch, open_corpus

PAPER = "usr/lib/R/site-library/coin/doc/a.Rnw"


def tar_of(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:xz") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            file.addfile(info)
    return raw.getvalue()


def deb_of(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    parts = {"debian-binary": b"2.0", "control.tar.xz": tar_of({}), "data.tar.xz": tar_of(members, links)}
    packed = b"!<arch>\n"
    for name, content in parts.items():
        packed += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        packed += content + b"\n" * (len(content) % 2)
    return packed


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """serve(archive): it is what `papers` consists of, on the second of two mirrors."""

    def put(archive: bytes, digest: str | None = None):
        (tmp_path / "mirror").mkdir(exist_ok=True)
        (tmp_path / "mirror" / "coin+1.deb").write_bytes(archive)
        mirrors = tuple((tmp_path / name).as_uri() + "/" for name in ("absent", "mirror"))
        listed = f"{digest or hashlib.sha256(archive).hexdigest()}  coin+1.deb"
        vignettes = fetch.Download("vignettes", mirrors, listed)
        monkeypatch.setattr(fetch, "OF_DOMAIN", {"papers": (vignettes,)})

    return put


def papers(data_dir) -> list:
    return list(open_corpus("papers", data_dir=str(data_dir)).read("train"))


def test_archives_are_fetched_and_unpacked_once(tmp_path, serve, monkeypatch):
    serve(deb_of({f"./{PAPER}": b"paper\n"}))
    monkeypatch.chdir(tmp_path)
    assert papers("data") == [("coin/a.Rnw", b"paper\n")]
    (tmp_path / "mirror" / "coin+1.deb").unlink()
    assert papers("data"), "from the cache"
    assert [path.name for path in (tmp_path / "data/fetched").iterdir()] == ["vignettes"]


def test_another_archive_is_refused_and_leaves_nothing(tmp_path, serve):
    archive = deb_of({f"./{PAPER}": b"paper\n"})
    serve(archive[:-9] + b"123456789", hashlib.sha256(archive).hexdigest())
    with pytest.raises(
        DataError, match=r"coin%2B1\.deb is another file than .* Put the right coin\+1\.deb into .*fetched"
    ):
        papers(tmp_path / "data")
    assert not list((tmp_path / "data/fetched").iterdir())
    # As the message says:
    (tmp_path / "data/fetched/coin+1.deb").write_bytes(archive)
    assert papers(tmp_path / "data")


def test_without_a_mirror_the_alternative_is_named(tmp_path, serve):
    serve(b"")
    (tmp_path / "mirror" / "coin+1.deb").unlink()
    with pytest.raises(DataError, match=r"^--domain=papers: file://.* cannot be read .*use --domain=code"):
        papers(tmp_path / "data")
    assert not list((tmp_path / "data/fetched").iterdir())


@pytest.mark.parametrize("name", ["./../../outside.txt", ".//outside.txt", "./usr/../../../outside.txt"])
def test_nothing_is_written_outside_of_the_folder(tmp_path, serve, name):
    serve(deb_of({name.replace("//", f"/{tmp_path}/"): b"x", f"./{PAPER}": b"paper\n"}))
    with pytest.raises(DataError, match="outside of its folder"):
        papers(tmp_path / "data")
    assert not list(tmp_path.rglob("outside.txt"))


def test_links_are_not_unpacked(tmp_path, serve):
    serve(deb_of({f"./{PAPER}": b"paper\n"}, links={"./link": "/etc"}))
    assert papers(tmp_path / "data")
    assert not (tmp_path / "data/fetched/vignettes/link").is_symlink()


def test_a_package_without_files_is_told(tmp_path, serve):
    serve(b"!<arch>\n")
    with pytest.raises(DataError, match=r"without data\.tar"):
        papers(tmp_path / "data")


def test_every_pinned_archive_has_a_digest_of_its_own():
    lines = [
        line.split()
        for downloads in fetch.OF_DOMAIN.values()
        for one in downloads
        for line in one.archives.strip().splitlines()
    ]
    assert len({digest for digest, _ in lines}) == len({path for _, path in lines}) == len(lines) == 18
    assert all(len(digest) == 64 for digest, _ in lines)
