"""Hooks of the documentation site: pages link to files outside of docs/, as they do on a code host.

Results and the documents of the root become part of the site. Links to other files, such as configs and source code,
lead to a copy of the file.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds everything in experiments/results, and all that pages link to."""
    found = [path for path in (ROOT / "experiments/results").iterdir() if path.is_file()]
    sources = [Path(page.abs_src_path) for page in files.documentation_pages() if page.abs_src_path]
    while found or sources:
        found += [target for source in sources for target in _targets(source)]
        sources = []
        for path in sorted(set(found)):
            if files.get_file_from_path(_place(path)) is None:
                files.append(File.generated(config, _place(path), abs_src_path=str(path)))
                sources += [path] if path.suffix == ".md" else []
        found = []
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """In the site the root of the repository and docs/ are one folder: `../BUILD.md` lies beside `docs/pods.md`."""
    source = Path(str(page.file.abs_src_path))
    here = os.path.dirname(_place(source))

    def moved(link: re.Match) -> str:
        target = _target(source, link[0])
        return link[0] if target is None else os.path.relpath(_place(target), here or ".")

    return LINK.sub(moved, markdown)


def _targets(source: Path) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for link in LINK.findall(source.read_text(encoding="utf-8")):
        if (target := _target(source, link)) is not None:
            yield target


def _target(source: Path, link: str) -> Path | None:
    path = Path(os.path.normpath(source.parent / link))
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _place(path: Path) -> str:
    """Where a file of the repository lies in the site."""
    return path.relative_to(ROOT).as_posix().removeprefix("docs/")
