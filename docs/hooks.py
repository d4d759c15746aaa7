"""Hooks of the documentation site: pages of docs/ link to files outside of it, as they do on a code host.

Results and the documents of the root become part of the site. Links to other files, such as configs and source code,
lead to a copy of the file.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()((?:\.\./)+|docs/)([^)\s#]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside docs/, and everything in experiments/results."""
    targets = {path for path in (ROOT / "experiments/results").iterdir() if path.is_file()}
    for page in files.documentation_pages():
        targets |= {ROOT / found[3] for found in LINK.finditer(page.content_string)}
    for path in sorted(target for target in targets if target.is_file()):
        uri = path.relative_to(ROOT).as_posix()
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """In the site the root of the repository and docs/ are one folder: `../BUILD.md` lies beside `docs/pods.md`."""
    return LINK.sub(r"\1\3", markdown)
