from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]
LLAMA_INDEX = REPO / "integrations/llama-index-llms-lazyrag/llama_index"
PACKAGES = {
    "lazyrag": REPO / "lazyrag",
    "lazyrag_kernels": REPO / "kernels/lazyrag_kernels",
    "llama_index.llms.lazyrag": LLAMA_INDEX / "llms/lazyrag",
    "langchain_lazyrag": REPO / "integrations/langchain-lazyrag/langchain_lazyrag",
}
SOURCES = sorted(file for folder in PACKAGES.values() for file in folder.rglob("*.py"))
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]

FRAMEWORKS = (
    "llama_index", "langchain", "langchain_core", "langchain_classic", "langchain_chroma",
    "langgraph", "chromadb",
)  # fmt: skip
INTEGRATIONS = ("llama_index.llms.lazyrag", "langchain_lazyrag")
UNSAFE_LOADERS = ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")

each_source = pytest.mark.parametrize(
    "path", SOURCES, ids=[str(file.relative_to(REPO)) for file in SOURCES]
)


def imports(tree: ast.AST, package: str = "") -> Iterator[str]:
    """Dotted names a module imports, at any depth, with the names taken from a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func)
            first = node.args[0]
            if name.endswith(("import_module", "__import__")) and isinstance(first, ast.Constant):
                yield str(first.value)


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def loads_unsafely(tree: ast.AST) -> list[str]:
    """Names of loaders that run code out of the file they read."""
    found = [name for name in imports(tree) if below(name, *UNSAFE_LOADERS, "torch.load")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            found.append("torch.load")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


def forbidden(module: str, name: str) -> bool:
    """Whether ``module`` may not import ``name``: integrations and cli → lazyrag → kernels."""
    if below(module, "lazyrag_kernels"):
        return below(name, "lazyrag", "transformers", "tokenizers", *FRAMEWORKS, *INTEGRATIONS)
    if below(module, "lazyrag.cli"):
        return False
    if below(module, "lazyrag"):
        return below(name, *FRAMEWORKS, *INTEGRATIONS, "lazyrag.cli")
    return below(name, "lazyrag.cli")


def module_name(path: Path) -> tuple[str, str]:
    """Dotted name of a source file and of the package it lies in."""
    for package, folder in PACKAGES.items():
        if folder in path.parents:
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                return ".".join(parts[:-1]), ".".join(parts[:-1])
            return ".".join(parts), ".".join(parts[:-1])
    raise AssertionError(path)


@each_source
def test_imports_point_one_way(path: Path) -> None:
    module, package = module_name(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [name for name in imports(tree, package) if forbidden(module, name)]


@each_source
def test_nothing_loads_pickles(path: Path) -> None:
    assert not loads_unsafely(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lazyrag_kernels.attention.cpu", "from lazyrag.types import NodeKey"),
        ("lazyrag_kernels.attention.cpu", "def f():\n    import transformers.cache_utils"),
        ("lazyrag.engine.engine", "from llama_index.core import Document"),
        ("lazyrag.engine.engine", "import importlib\nimportlib.import_module('chromadb')"),
        ("lazyrag.engine.engine", "from ..cli import main"),
        ("lazyrag.adapter.fields", "from langchain_core.messages import AIMessage"),
        ("llama_index.llms.lazyrag.base", "from lazyrag.cli import index"),
        ("langchain_lazyrag.chat", "from lazyrag.cli import index"),
    ],
)
def test_the_import_rule_sees(module: str, source: str) -> None:
    names = imports(ast.parse(source), module.rpartition(".")[0])
    assert any(forbidden(module, name) for name in names)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import load",
        "import torch\ntorch.load('x')",
        "read = torch.load",
        "np.load(f, allow_pickle=False)",
    ],
)
def test_the_pickle_rule_sees(source: str) -> None:
    assert loads_unsafely(ast.parse(source))


def test_transformers_imports_from_the_repository_root() -> None:
    """Importing transformers looks for a package `kernels`, and once took our folder for it."""
    code = "import transformers; transformers.LlamaForCausalLM; print(transformers.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "folder",
    [
        REPO / "kernels",
        REPO / "integrations",
        *sorted((REPO / "integrations").glob("*/")),
        LLAMA_INDEX,
        LLAMA_INDEX / "llms",
    ],
    ids=lambda folder: str(folder.relative_to(REPO)),
)
def test_namespaces_of_others_hold_no_init(folder: Path) -> None:
    assert not (folder / "__init__.py").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline, out of the source archive so that no old build is in the way."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(REPO)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_the_sources_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if ".dist-info/" not in name}
    expected = set()
    for package, folder in PACKAGES.items():
        prefix = package.replace(".", "/")
        for file in [*folder.rglob("*.py"), *folder.rglob("py.typed")]:
            expected.add(f"{prefix}/{file.relative_to(folder).as_posix()}")
    assert code == expected
    assert {
        "lazyrag/py.typed",
        "lazyrag_kernels/py.typed",
        "llama_index/llms/lazyrag/py.typed",
        "langchain_lazyrag/py.typed",
    } <= (code)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_version_is_the_same_everywhere() -> None:
    number = PROJECT["version"]
    assert importlib.metadata.version("lazyrag") == number
    assert (REPO / "CHANGELOG.md").read_text(encoding="utf-8").count(f"## [{number}]") == 1
    script = str(Path(sys.executable).with_name("lazyrag"))
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert number in done.stdout


def declared() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    return [one for one in map(Requirement, lines) if one.name != "lazyrag"]


def test_what_is_imported_is_declared() -> None:
    """A package that came along with another one once went missing when that one dropped it."""
    allowed = {canonicalize_name(one.name) for one in declared()}
    providers = importlib.metadata.packages_distributions()
    undeclared = set()
    for path in SOURCES:
        package = module_name(path)[1]
        for name in imports(ast.parse(path.read_text(encoding="utf-8")), package):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or below(name, *PACKAGES):
                continue
            if not allowed & set(map(canonicalize_name, providers.get(top, ()))):
                undeclared.add((str(path.relative_to(REPO)), top))
    assert not undeclared


def test_the_tested_set_lies_inside_the_declared_ranges() -> None:
    pins = {}
    for line in (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(pins[name]), name


def test_all_is_all_of_the_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    inside = extras["all"][0].removeprefix("lazyrag[").removesuffix("]").split(",")
    assert len(extras["all"]) == 1
    assert set(inside) == set(extras) - {"all"}
