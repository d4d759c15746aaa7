"""The documents keep their word: links lead somewhere, code blocks run, commands and configs exist.

Nothing here needs mkdocs or a network. Checks are functions of a page's text and are first shown text that they must
refuse.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import aamoe_jax
from aamoe_jax.config import ConfigError
from aamoe_jax.extensions import import_mixers
from aamoe_jax.registry import MIXERS
from experiments.binding import CONFIGS, bindable_fields, load_experiment
from launch.cluster.exits import TABLE
from launch.cluster.job import Job
from launch.cluster.settings import CLUSTERS, settings_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = tempfile.TemporaryDirectory()
"""Where the mixers lie that a page writes."""
ROOT_PAGES = ("README.md", "BUILD.md", "CONTRIBUTING.md", "CHANGELOG.md", "pallas_kernels/README.md")
PAGES = {path: (ROOT / path).read_text(encoding="utf-8") for path in ROOT_PAGES} | {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))
}
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAM_FOLDERS = ("launch", "experiments", "benchmarks")


# Links.


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as python-markdown makes them."""
    found = set()
    for heading in re.findall(r"^#+ +(.*?)$", FENCE.sub("", text), flags=re.MULTILINE):
        plain = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


def broken_links(page: str, text: str) -> list[str]:
    """Relative links and images of a page that lead to no file, or to no heading of it."""
    complaints = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path
        if not file.exists():
            complaints.append(f"{page}: {target} does not exist")
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8") if path else text):
            complaints.append(f"{page}: {target}: no such heading")
    return complaints


def navigation() -> list[str]:
    """The pages that mkdocs.yml lists, as paths from docs/."""

    class Loader(yaml.SafeLoader):
        """mkdocs.yml names Python functions by tag; they are not needed here."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)

    def leaves(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for item in entry.values() if isinstance(entry, dict) else entry:
                yield from leaves(item)

    return list(leaves(config["nav"]))


class TestLinks:
    def test_a_broken_link_is_seen(self):
        assert broken_links("docs/x.md", "[a](nowhere.md)")
        assert broken_links("docs/x.md", "![a](pods.md#no-such-heading)")
        assert broken_links("docs/x.md", "[a](#nowhere)\n# Here")
        assert not broken_links("docs/x.md", "[a](pods.md#slurm) [b](#here-and-there) `[c](no)`\n# Here, and there\n")

    @pytest.mark.parametrize("page", PAGES)
    def test_links_lead_somewhere(self, page):
        complaints = broken_links(page, PAGES[page])
        assert not complaints, "\n".join(complaints)

    def test_every_page_is_in_the_navigation(self):
        assert sorted(navigation()) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

    def test_every_result_is_in_the_index(self):
        linked = set(re.findall(r"\]\(\.\./experiments/results/([^)]+)\)", PAGES["docs/results.md"]))
        assert {path.name for path in (ROOT / "experiments/results").glob("*.md")} <= linked

    def test_every_picture_is_shown_or_linked(self):
        everything = "".join(PAGES.values())
        assert not [
            path.name for kind in ("*.png", "*.svg") for path in DOCS.rglob(kind) if path.name not in everything
        ]


# Python.

SNIPPETS = [
    pytest.param(page, block, id=f"{page}-{number}")
    for page, text in PAGES.items()
    if page != "docs/python.md"  # which trains: tests/test_api.py runs it for a few steps
    for number, block in enumerate(block for language, block in FENCE.findall(text) if language == "python")
]


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_a_python_block_runs_and_prints_what_it_says(page, snippet, capsys):
    """Every `print(...)  # text` prints that text, and nothing else is printed."""
    exec(compile(snippet, page, "exec"), {})
    promised = re.findall(r"^print\(.*\)  # (.*)$", snippet, flags=re.MULTILINE)
    assert promised, "a block shows what it does by at least one print(...)  # output"
    assert capsys.readouterr().out.splitlines() == promised


# Commands.


def logical_lines(block: str) -> list[str]:
    """The lines of a block, those that end in a backslash joined."""
    return re.sub(r"\\\n\s*", "", block).splitlines()


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(module, words behind it) of every `python -m module ...` in the code of a page, as a shell would split it."""
    inline = re.findall(r"`([^`\n]*python -m [^`\n]*)`", FENCE.sub("", text))
    lines = [line for _, block in FENCE.findall(text) for line in logical_lines(block)]
    found = []
    for line in [*lines, *inline]:
        match = re.search(r"python3? -m ([\w.]+)(.*)", line)
        if match and match[1].split(".")[0] in (*PROGRAM_FOLDERS, "aamoe_jax"):
            found.append((match[1], shlex.split(match[2], comments=True)))
    return found


def module_file(name: str) -> Path | None:
    """The source of a module that can be run, or None."""
    path = ROOT / name.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__main__.py")
    return next((file for file in candidates if file.is_file()), None)


def defined_flags(tree: ast.AST) -> Iterator[str]:
    """The flags that some code defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and node.args:
            name, first = ast.unparse(node.func).rpartition(".")[2], node.args[0]
            if re.match(r"DEFINE_|add_argument$", name) and isinstance(first, ast.Constant):
                yield str(first.value).removeprefix("--")


@functools.cache
def flags_of(module: str) -> frozenset[str]:
    """The flags that a program defines, read off its source: to import every program takes minutes.

    Those of a function of launch/program.py or experiments/studies.py, such as `define_experiment_flags`, belong to it
    where it calls that function, those of benchmarks/measure.py where it calls `define_model_flags`, those of clusters
    to launch.cluster.
    """
    source = module_file(module).read_text(encoding="utf-8")
    found = set(defined_flags(ast.parse(source)))
    owners = [module_file(name).read_text(encoding="utf-8") for name in ("launch.program", "experiments.studies")]
    functions = (node for owner in owners for node in ast.parse(owner).body if isinstance(node, ast.FunctionDef))
    shared = {node.name: node for node in functions if re.fullmatch(r"define_\w+_flags?", node.name)}
    called = {name for name in shared if f"{name}()" in source}
    called |= {other for name in called for other in shared if f"{other}()" in ast.unparse(shared[name])}
    found |= {flag for name in called for flag in defined_flags(shared[name])}
    if "measure.define_model_flags()" in source:
        found |= flags_of("benchmarks.measure")
    if module == "launch.cluster":
        found |= {name for owner in (Job, *CLUSTERS.values()) for name in settings_of(owner)}
    return frozenset(found)


def named_flags(words: list[str]) -> set[str]:
    """Flags among the words of a command, `--x=1` and `--x 1` alike; `--nox` is `--x`."""
    return {word.removeprefix("--").partition("=")[0] for word in words if re.match(r"--\w", word)}


def wrong_commands(page: str, text: str) -> list[str]:
    """Commands of a page whose program does not exist or does not have their flags."""
    complaints = []
    for module, words in commands(text):
        if module_file(module) is None:
            complaints.append(f"{page}: there is no program {module}")
            continue
        # Behind -- stand the words of another program, which launch.cluster starts.
        own, _, others = " ".join(map(shlex.quote, words)).partition(" -- ")
        parts = [(module, shlex.split(own))]
        if others:
            inner, *inner_words = shlex.split(others)
            parts.append((inner, inner_words))
        for program, given in parts:
            unknown = named_flags(given) - flags_of(program)
            complaints += [f"{page}: {program} has no flag --{flag}" for flag in sorted(unknown)]
    return complaints


@pytest.fixture(scope="module")
def all_flags() -> set[str]:
    """The flags of all programs."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in PROGRAM_FOLDERS
        for path in (ROOT / folder).glob("*.py")
    ]
    return {f"--{flag}" for module in [*modules, "launch.cluster"] for flag in flags_of(module)}


class TestCommands:
    def test_a_wrong_command_is_seen(self):
        for bad in ("launch.trane --run_dir=x", "launch.train --rundir=x", "launch.cluster run -- launch.train --x=1"):
            assert wrong_commands("x.md", f"```\npython -m {bad}\n```"), bad
            assert wrong_commands("x.md", f"`python -m {bad}`"), bad
        good = "python -m launch.cluster --cluster=gke --name=x \\\n  run -- launch.train --gin_file=a.gin --run_dir=b"
        assert not wrong_commands("x.md", f"```\n{good}  # --no\n```")

    @pytest.mark.parametrize("page", PAGES)
    def test_programs_and_their_flags_exist(self, page):
        complaints = wrong_commands(page, PAGES[page])
        assert not complaints, "\n".join(complaints)

    @pytest.mark.parametrize("page", PAGES)
    def test_flags_in_the_text_exist(self, page, all_flags):
        named = set(re.findall(r"`(--\w[\w-]*)", FENCE.sub("", PAGES[page])))
        assert not named - all_flags

    def test_every_program_is_in_the_table_of_the_readme(self):
        shipped = {path.stem for path in (ROOT / "launch").glob("*.py")} - {"__init__", "__main__", "program"}
        shipped |= {"cluster"}
        assert set(re.findall(r"^\| `launch\.(\w+)` \|", PAGES["README.md"], flags=re.MULTILINE)) == shipped

    def test_make_targets_exist(self):
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        inline = [code for text in PAGES.values() for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", text))]
        blocks = [block for text in PAGES.values() for _, block in FENCE.findall(text)]
        named = set(re.findall(r"(?:^|\s)make ([a-z][\w-]*)", "\n".join(inline + blocks)))
        assert {"train", "test", "docs"} <= named <= targets


# Configs.


def written_files(text: str) -> dict[str, str]:
    """The files that the blocks of a page write with `cat > NAME <<'END'`."""
    blocks = "".join(block for _, block in FENCE.findall(text))
    return dict(re.findall(r"cat > (\S+) <<'END'\n(.*?)^END$", blocks, flags=re.MULTILINE | re.DOTALL))


def write_files(text: str, folder: Path) -> None:
    """Writes the files of `written_files` into a folder."""
    for name, content in written_files(text).items():
        (folder / name).write_text(content, encoding="utf-8")


def values_of(words: list[str]) -> dict[str, list[str]]:
    """The values of the flags of a command, by flag."""
    found: dict[str, list[str]] = {}
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        found.setdefault(name, []).append(value)
    return found


def experiments_of(text: str) -> list[tuple[list[str], list[str]]]:
    """(gin files, gin params) of every command and every gin block of a page; blocks are params, line by line."""
    found = []
    for _, words in commands(text):
        for name in values_of(words).get("import", []):
            path, written = ROOT / name, written_files(text)
            if name in written:  # always in the same place, for a module is imported once
                path = Path(WRITTEN.name) / name
                path.write_text(written[name], encoding="utf-8")
            import_mixers(str(path))
        files, params = (values_of(words).get(name, []) for name in ("gin_file", "gin_param"))
        if not any(name.isupper() for name in files):  # a placeholder
            found.append((files, params))
    for language, block in FENCE.findall(text):
        if language == "gin":
            found += [([], [line]) for line in block.splitlines() if line.strip() and line[0] not in "# "]
    return [each for each in found if any(each)]


class TestConfigs:
    @pytest.mark.parametrize("page", PAGES)
    def test_what_commands_and_gin_blocks_bind_loads(self, page, tmp_path, monkeypatch):
        write_files(PAGES[page], tmp_path)
        monkeypatch.chdir(tmp_path)
        for gin_files, gin_params in experiments_of(PAGES[page]):
            # `chunk_size = 8` binds a macro of the shipped configs.
            load_experiment(gin_files or ["aamoe.gin"], gin_params)

    @pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
    def test_own_text_is_prepared_for_the_config_that_reads_it(self, page, tmp_path, monkeypatch):
        experiments_of(PAGES[page])  # which imports the mixers of its commands
        write_files(PAGES[page], tmp_path)
        monkeypatch.chdir(tmp_path)
        aligned = {
            given["name"][0]: int(given["document_align"][0])
            for module, words in commands(PAGES[page])
            if module == "launch.prepare" and "document_align" in (given := values_of(words))
        }
        readers = [values_of(words) for module, words in commands(PAGES[page]) if module == "launch.train"]
        data = [load_experiment(given.get("gin_file", []), given.get("gin_param", [])).data for given in readers]
        read = {name: each.document_align for each in data for name, _ in each.mixture if name in aligned}
        assert aligned
        assert read == aligned

    def test_a_wrong_binding_is_seen(self):
        (found,) = experiments_of("```gin\nModelConfig.d_modle = 3\n```")
        with pytest.raises(ConfigError, match="d_modle"):
            load_experiment(*found)

    @pytest.mark.parametrize("page", PAGES)
    def test_configs_and_fields_exist(self, page):
        text = PAGES[page]
        shipped = {path.name for path in CONFIGS.glob("*.gin")} | set(written_files(text))
        assert set(re.findall(r"\b(\w+\.gin)\b", text)) - {"config.gin", "a.gin", "b.gin"} <= shipped
        experiments_of(text)  # which imports the mixers of its commands
        assert set(re.findall(r"\b([A-Z]\w*Config\.[a-z]\w*)\b", text)) <= set(bindable_fields())

    def test_every_shipped_config_is_described(self):
        assert not [path.name for path in CONFIGS.glob("*.gin") if f"`{path.name}`" not in PAGES["docs/configs.md"]]


# Tables that must be complete.


class TestCompleteness:
    def test_every_mixer_is_described(self):
        shipped = [name for name, entry in MIXERS.items() if entry.cls.__module__.startswith("aamoe_jax.")]
        assert not [name for name in shipped if f"`{name}`" not in PAGES["docs/mixers.md"]]

    def test_every_public_name_is_in_the_reference(self):
        names = set(aamoe_jax.__all__) - {"__version__"}
        assert not [name for name in names if not re.search(rf"\b{name}\b", PAGES["docs/api.md"])]

    def test_every_exit_code_is_explained(self):
        rows = re.findall(r"^\| (\d+) \|", PAGES["docs/fault_tolerance.md"], flags=re.MULTILINE)
        assert set(map(int, rows)) == {row.code for row in TABLE} - {6, 134, 137, 139}

    def test_the_table_of_equations_names_code_that_exists(self):
        named = re.findall(r"`(\w[\w/]*\.py)(?::([\w.]+))?`", PAGES["docs/paper.md"])
        assert len(named) > 15
        for path, name in named:
            tree = ast.parse((ROOT / "aamoe_jax" / path).read_text(encoding="utf-8"))
            assert not name or name in set(defined(tree)), f"docs/paper.md: {path} has no {name}"

    def test_reference_modules_exist(self):
        named = re.findall(r"^::: ([\w.]+)$", PAGES["docs/api.md"], flags=re.MULTILINE)
        assert named
        for name in named:
            module, _, attribute = name.rpartition(".")
            spec = importlib.util.find_spec(module)
            assert attribute in set(defined(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))), name

    def test_the_readme_is_short(self):
        assert len(PAGES["README.md"].split()) <= 1800


class TestVersions:
    """What is written in several places is the same in all of them."""

    def test_of_ruff(self):
        (pinned,) = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
        config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
        assert [repository["rev"] for repository in config["repos"] if repository["repo"] != "local"] == [f"v{pinned}"]

    def test_of_this_project(self):
        version = aamoe_jax.__version__
        assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
        assert f"\n## [{version}]" in PAGES["CHANGELOG.md"]
        assert f"Version {version}" in PAGES["README.md"]

    def test_of_the_documentation_tools(self):
        pins = (ROOT / "constraints.txt").read_text()
        assert all(f"\n{name}==" in pins for name in ("mkdocs", "mkdocs-material", "mkdocstrings"))

    def test_continuous_integration_runs_commands_that_exist(self):
        workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
        steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert {"test", "train"} <= {step.split()[-1] for step in steps} <= set(targets)


def defined(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and their methods, as `name` and `Class.method`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef))
