"""The measures of the house, held by tests: direction of imports, sizes, docstrings, what no file may contain.

Every check is a function from sources to complaints, `file:line: what`, and is first shown a snippet that it must
refuse: a check that cannot fail holds nothing.
"""

from __future__ import annotations

import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RANK = {"pallas_kernels": 0, "aamoe_jax": 1, "experiments": 2, "launch": 3, "benchmarks": 3, "tests": 4}
"""Imports run towards lower ranks. Rooms of one rank do not import each other."""
LAYERS = (
    ("registry", "patterns", "markdown", "shards"),
    ("config",),
    ("bucket",),
    ("files",),
    ("layers", "data", "extensions"),
    ("mixers",),
    ("aamoe",),
    ("cost", "model"),
    ("ledger", "sharding"),
    ("training",),
    ("evaluation", "preflight"),
    ("generation", "analysis"),
    ("check", "harness"),
    ("__init__",),
)
"""The packages and modules of aamoe_jax, each above what it may import. Those of one line do not import each other."""
PACKAGES = ("aamoe_jax", "pallas_kernels", "experiments", "launch")
FUNCTION_LINES = 80
KERNEL_FUNCTION_LINES = 150
FILE_LINES = 600

Sources = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_sources(*folders: str) -> Sources:
    """Every Python file under the folders, by its path from the root."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def nodes(sources: Sources) -> Iterator[tuple[str, ast.AST]]:
    """(file, node) for every syntax node."""
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            yield path, node


def functions(sources: Sources) -> Iterator[tuple[str, Function]]:
    """(file, function), methods and inner functions included."""
    return ((path, node) for path, node in nodes(sources) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines from `def` to the end, docstring included, decorators not."""
    return function.end_lineno - function.lineno + 1


# What the checks look for: sources -> complaints.


def imported_modules(node: ast.AST) -> list[str]:
    """The modules that an import names, also as `from package import module`; relative ones stay in their package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def upward_imports(sources: Sources) -> list[str]:
    """Imports against the direction launch -> experiments -> aamoe_jax -> pallas_kernels."""
    complaints = []
    for path, node in nodes(sources):
        room = path.split("/")[0]
        for module in imported_modules(node):
            target = module.split(".")[0]
            if target != room and target in RANK and RANK[target] >= RANK[room]:
                complaints.append(f"{path}:{node.lineno}: {room} imports {target}")
    return complaints


def upward_imports_inside(sources: Sources) -> list[str]:
    """Imports inside aamoe_jax against the direction of LAYERS, and units that LAYERS does not have."""
    rank = {name: index for index, names in enumerate(LAYERS) for name in names}
    complaints = []
    for path, node in nodes(sources):
        package, *inside = path.removesuffix(".py").split("/")
        if package != "aamoe_jax":
            continue
        if inside[0] not in rank:
            complaints.append(f"{path}:1: LAYERS does not have {inside[0]}")
            continue
        for module in imported_modules(node):
            if not module.startswith("aamoe_jax."):
                continue
            target = module.split(".")[1]
            if target != inside[0] and rank.get(target, 0) >= rank[inside[0]]:
                complaints.append(f"{path}:{node.lineno}: {inside[0]} imports {target}")
    return sorted(set(complaints))


def foreign_imports(sources: Sources, *, forbidden: tuple[str, ...]) -> list[str]:
    """Imports of the forbidden modules, or of anything inside them."""
    return [
        f"{path}:{node.lineno}: imports {module}"
        for path, node in nodes(sources)
        for module in imported_modules(node)
        if any(f"{module}.".startswith(f"{name}.") for name in forbidden)
    ]


def long_functions(sources: Sources) -> list[str]:
    """Functions that are longer than their room allows."""
    return [
        f"{path}:{function.lineno}: {function.name} has {length(function)} lines"
        for path, function in functions(sources)
        if length(function) > (KERNEL_FUNCTION_LINES if path.startswith("pallas_kernels/") else FUNCTION_LINES)
    ]


def long_files(sources: Sources) -> list[str]:
    """Files that have grown into two."""
    lines = {path: len(source.splitlines()) for path, source in sources.items()}
    return [f"{path}:1: {count} lines" for path, count in lines.items() if count > FILE_LINES]


def compatibility_probes(sources: Sources) -> list[str]:
    """`hasattr`, and `getattr` with a default: code that does not know what it holds."""
    return [
        f"{path}:{node.lineno}: {node.func.id}"
        for path, node in nodes(sources)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3))
    ]


def swallowed_exceptions(sources: Sources) -> list[str]:
    """Bare `except`, and handlers (or `suppress`) of every exception that do nothing about it."""
    complaints = []
    for path, node in nodes(sources):
        if isinstance(node, ast.ExceptHandler):
            idle = all(isinstance(item, ast.Pass | ast.Continue | ast.Break) or _is_literal(item) for item in node.body)
            if node.type is None or (idle and _names_all_exceptions(node.type)):
                complaints.append(f"{path}:{node.lineno}: swallows exceptions")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
            complaints += [f"{path}:{node.lineno}: suppresses all" for item in node.args if _names_all_exceptions(item)]
    return complaints


def _is_literal(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _names_all_exceptions(node: ast.expr) -> bool:
    caught = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(isinstance(item, ast.Name) and item.id in ("Exception", "BaseException") for item in caught)


def undocumented_functions(sources: Sources) -> list[str]:
    """Public functions, classes and methods without a docstring.

    Three kinds may go without: a method of one statement, an implementation of a method that another class of the file
    documents, and the `main` of a program, whose module says what it does.
    """
    complaints = []
    for path, source in sources.items():
        tree = ast.parse(source)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        inherited = {item.name for cls in classes for item in cls.body if _documented(item)}
        public = [node for node in tree.body if _is_public(node) and not (node.name == "main" and _documented(tree))]
        for cls in filter(_is_public, classes):
            public += [
                item for item in cls.body if _is_public(item) and len(item.body) > 1 and item.name not in inherited
            ]
        silent = [node for node in public if not _documented(node)]
        complaints += [f"{path}:{node.lineno}: {node.name} has no docstring" for node in silent]
    return complaints


def _is_public(node: ast.stmt) -> bool:
    return isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")


def _documented(node: ast.AST) -> bool:
    return isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node) is not None


def explained_share(sources: Sources) -> float:
    """The share of lines, blank ones left out, that are docstring or carry a comment."""
    explained = total = 0
    for source in sources.values():
        lines = source.splitlines()
        marked = {
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.stmt) and _is_literal(node) and isinstance(node.value.value, str):
                marked |= set(range(node.lineno, node.end_lineno + 1))
        explained += sum(bool(lines[number - 1].strip()) for number in marked)
        total += sum(bool(line.strip()) for line in lines)
    return explained / total


def undefined_names(folder: Path) -> list[str]:
    """Names that are used and nowhere defined. Linters are told to look past them, since to them the `"n"` of
    jaxtyping's `Int[Array, "n"]` is one: here what stands in quotes does not count."""
    command = ["ruff", "check", "--isolated", "--no-cache", "--select=F821", "--output-format=json", "."]
    ran = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True)
    complaints = []
    for hit in json.loads(ran.stdout):
        path, row, column = Path(hit["filename"]), hit["location"]["row"], hit["location"]["column"]
        line = path.read_text(encoding="utf-8").splitlines()[row - 1]
        if not re.search(r'"[\w ]*\*?$', line[: column - 1]):
            complaints.append(f"{path.relative_to(folder)}:{row}: {hit['message']}")
    return complaints


def machine_paths(sources: Sources) -> list[str]:
    """Absolute paths that exist on one machine."""
    pattern = re.compile(r"(?<![\w.~/:-])/(work|root|home)(?![\w.-])")
    return [
        f"{path}:{number}: {line.strip()[:80]}"
        for path, source in sources.items()
        for number, line in enumerate(source.splitlines(), 1)
        if pattern.search(line)
    ]


# The house as it stands.


@pytest.fixture(scope="module")
def packages() -> Sources:
    """What is installed."""
    return python_sources(*PACKAGES)


@pytest.fixture(scope="module")
def everything() -> Sources:
    """All Python of the repository."""
    return python_sources(*RANK)


def tracked_files() -> list[str]:
    """Paths under version control."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what is tracked is unknown")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def assert_none(complaints: list[str]) -> None:
    """Fails with one complaint per line."""
    assert not complaints, "\n" + "\n".join(complaints)


class TestDirection:
    @pytest.mark.parametrize(
        ("path", "source"),
        [
            ("aamoe_jax/x.py", "import launch.train"),
            ("aamoe_jax/x.py", "def f():\n    from experiments import binding"),
            ("pallas_kernels/x.py", "from aamoe_jax.config import ModelConfig"),
            ("experiments/x.py", "from tests import helpers"),
            ("launch/x.py", "import benchmarks"),
        ],
    )
    def test_sees_an_import_against_the_direction(self, path, source):
        assert upward_imports({path: source})

    def test_imports_run_one_way(self, everything):
        assert not upward_imports(
            {"launch/x.py": "import experiments.binding, aamoe_jax\nfrom pallas_kernels import aot"}
        )
        assert_none(upward_imports(everything))

    @pytest.mark.parametrize(
        ("path", "source"),
        [
            ("aamoe_jax/mixers/x.py", "from aamoe_jax.aamoe.layer import AAMoELayer"),
            ("aamoe_jax/mixers/x.py", "def f():\n    from aamoe_jax import model"),
            ("aamoe_jax/registry.py", "import aamoe_jax.config"),
            ("aamoe_jax/layers.py", "from aamoe_jax import data"),
            ("aamoe_jax/elsewhere.py", "x = 1"),
        ],
    )
    def test_sees_an_import_against_the_direction_inside_the_library(self, path, source):
        assert upward_imports_inside({path: source})

    def test_imports_inside_the_library_run_one_way(self, packages):
        assert not upward_imports_inside({"aamoe_jax/aamoe/x.py": "from aamoe_jax.mixers import base\nimport jax"})
        assert_none(upward_imports_inside(packages))

    def test_the_library_knows_no_gin_and_no_flags(self):
        forbidden = ("gin", "absl.flags", "absl.app")
        for bad in ("import gin", "from gin import config_parser", "from absl import flags", "import absl.flags as f"):
            assert foreign_imports({"x.py": bad}, forbidden=forbidden), bad
        assert not foreign_imports({"x.py": "from absl import logging\nimport ginseng"}, forbidden=forbidden)
        assert_none(foreign_imports(python_sources("aamoe_jax"), forbidden=forbidden))


class TestSizes:
    def test_no_function_is_longer_than_its_room_allows(self, packages):
        body = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
        assert long_functions({"aamoe_jax/x.py": body})
        assert not long_functions({"pallas_kernels/x.py": body})
        assert long_functions({"pallas_kernels/x.py": "def f():\n" + "    x = 1\n" * KERNEL_FUNCTION_LINES})
        assert_none(long_functions(packages))

    def test_no_file_is_longer_than_600_lines(self, everything):
        assert long_files({"x.py": "x = 1\n" * (FILE_LINES + 1)})
        assert_none(long_files(everything))

    def test_most_functions_are_short(self, packages):
        lengths = [length(function) for _, function in functions(packages)]
        assert statistics.median(lengths) <= 14
        assert statistics.quantiles(lengths, n=10)[-1] <= 45

    def test_length_counts_the_docstring_and_not_the_decorator(self):
        source = '@cache\ndef f():\n    """Doc."""\n    return 1\n'
        assert [length(function) for _, function in functions({"x.py": source})] == [3]


class TestWords:
    def test_every_public_function_says_what_it_does(self, packages):
        method = 'class A:\n    """Doc."""\n    def f(self):\n        x = 1\n        return x'
        for bad in ("def f(): pass", "class A: pass", method):
            assert undocumented_functions({"x.py": bad}), bad
        assert not undocumented_functions({"x.py": "def _f(): pass\ndef g():\n    'Doc.'"})
        assert_none(undocumented_functions(packages))

    def test_neither_silent_nor_chattering(self, packages):
        assert explained_share({"x.py": "# why\nx = 1\n\ny = 2  # what\nz = '# no'\n"}) == 0.5
        assert explained_share({"x.py": '"""Two\n\nlines."""\nx = 1\ny = 2\n'}) == 0.5
        assert 0.10 <= explained_share(packages) <= 0.40


class TestNothingHidden:
    def test_no_compatibility_probes(self, everything):
        for bad in ("hasattr(x, 'y')", "getattr(x, 'y', None)"):
            assert compatibility_probes({"x.py": bad}), bad
        assert not compatibility_probes({"x.py": "getattr(x, name)"})
        assert_none(compatibility_probes(everything))

    def test_no_swallowed_exceptions(self, everything):
        for handler in ("except: raise", "except Exception: pass", "except (ValueError, Exception): ..."):
            assert swallowed_exceptions({"x.py": f"try: f()\n{handler}"}), handler
        assert swallowed_exceptions({"x.py": "with contextlib.suppress(Exception): f()"})
        assert not swallowed_exceptions({"x.py": "try: f()\nexcept KeyError: pass\nexcept Exception as e: log(e)"})
        assert_none(swallowed_exceptions(everything))

    def test_no_undefined_names(self, tmp_path):
        (tmp_path / "x.py").write_text('from y import Int\n\ndef f(x: Int["n"]):\n    return missing(x)\n')
        assert undefined_names(tmp_path) == ["x.py:4: Undefined name `missing`"]
        assert_none(undefined_names(ROOT))

    def test_no_path_of_one_machine(self):
        for room in ("work", "root", "home"):
            assert machine_paths({"x.md": f"see `/{room}/me/x`"})
            assert machine_paths({"x.py": f"'/{room}'"})
        assert not machine_paths({"x.md": "https://example.org/home and docs/work/x and frame/work"})
        sources = {}
        for name in tracked_files():
            data = (ROOT / name).read_bytes()
            if b"\0" not in data:
                sources[name] = data.decode("utf-8")
        assert_none(machine_paths(sources))
