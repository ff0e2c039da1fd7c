"""Who may import whom: the table of docs/architecture.md, held against every import in the source.

Layers have no cycles; inside the package imports are relative; and what runs an engine imports
neither torch nor transformers nor onnx.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# `errors` and the package's own `__version__` are for everybody.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "kernels": set(),
    "compiler.ir": set(),
    "compiler.analysis": {"compiler.ir"},
    "compiler.frontend": {"compiler.ir"},
    "compiler.quantize": {"compiler.ir", "kernels"},
    "compiler.gguf": {"compiler.ir", "compiler.frontend", "compiler.quantize", "compiler.engine",
                      "kernels"},
    "compiler.calibrate": {"compiler.ir", "compiler.gguf"},
    "compiler.backends": {"compiler.ir", "compiler.quantize", "kernels"},
    "compiler.engine": {"kernels"},
    "compiler.golden": set(),
    "compiler.solve": {
        "compiler.ir", "compiler.analysis", "compiler.quantize", "compiler.engine", "kernels",
    },
    "passes": {"compiler.ir", "compiler.analysis"},
    "runtime": {"compiler.engine", "kernels"},
    "compiler.assembly": {
        "compiler.ir", "compiler.analysis", "compiler.frontend", "compiler.quantize",
        "compiler.gguf", "compiler.calibrate", "compiler.backends", "compiler.engine",
        "compiler.golden", "compiler.solve", "passes", "kernels",
    },
    "driver": {
        "compiler.ir", "compiler.frontend", "compiler.quantize", "compiler.backends",
        "compiler.engine", "compiler.golden", "compiler.assembly", "passes", "runtime", "kernels",
    },
    "console": {
        "compiler.assembly", "compiler.engine", "compiler.frontend", "compiler.gguf",
        "compiler.golden", "driver", "runtime", "kernels",
    },
    "cli": {"console"},
}  # fmt: skip
PACKAGES = ("compiler", "passes", "runtime", "kernels", "console")
HEAVY = ("torch", "transformers", "onnx", "safetensors", "gguf", "llguidance")


def sources() -> list[Path]:
    """Python files of the package."""
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    return sorted([*files, *(ROOT / f"{name}.py" for name in ("errors", "driver", "cli"))])


def part_of(module: str) -> str:
    """The row of the table that a module (relative to the package) belongs to."""
    names = module.split(".")
    depth = 2 if names[0] == "compiler" else 1
    return ".".join(names[:depth])


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module relative to the package) of each relative import in a file."""
    module = list(path.relative_to(ROOT).with_suffix("").parts)
    package = module if path.name == "__init__.py" else module[:-1]
    package = [name for name in package if name != "__init__"]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            if node.module:
                yield node.lineno, ".".join([*base, node.module])
            else:
                yield from ((node.lineno, ".".join([*base, a.name])) for a in node.names)


def test_layers_have_no_cycles() -> None:
    order = list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())
    assert set(order) == set(MAY_IMPORT)


def test_every_file_belongs_to_a_layer() -> None:
    plain = {"compiler.__init__"}
    parts = {
        part_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in sources()
    } - plain
    assert {part.removesuffix(".__init__") for part in parts} <= set(MAY_IMPORT)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_stay_within_the_layers(part: str) -> None:
    wrong = []
    for path in sources():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if part_of(module).removesuffix(".__init__") != part:
            continue
        for line, target in imports(path):
            other = part_of(target)
            allowed = {part, "errors", "__version__", *MAY_IMPORT[part]}
            if other not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}")
    assert wrong == []


def test_imports_inside_the_package_are_relative() -> None:
    absolute = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources()
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"\s*(import|from) spikeinfer\b", line)
    ]
    assert absolute == []


def test_the_table_is_the_one_in_the_documentation() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z.]+)` \| .+ \| (.+?) \|$", text, re.MULTILINE))
    written = {part: set(re.findall(r"`([a-z.]+)`", cell)) for part, cell in rows.items()}
    assert written == MAY_IMPORT


BLOCKER = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy!r}:
            raise ImportError(f"{{name}} must not be needed here")
sys.meta_path.insert(0, Refuse())
import importlib
for module in {modules!r}:
    importlib.import_module(module)
assert not set({heavy!r}) & set(sys.modules)
"""


def test_running_an_engine_needs_no_compiler_packages() -> None:
    console = [f"spikeinfer.console.{p.stem}" for p in (ROOT / "console").glob("[a-z]*.py")]
    runtime = [f"spikeinfer.runtime.{p.stem}" for p in (ROOT / "runtime").glob("[a-z]*.py")]
    modules = ["spikeinfer", "spikeinfer.cli", "spikeinfer.compiler.golden", *console, *runtime]
    code = BLOCKER.format(heavy=HEAVY, modules=modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_loads_neither_arrays_nor_models() -> None:
    code = "import sys, spikeinfer.cli; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint({"numpy", "onnxruntime", "rich.progress", "yaml", *HEAVY})
