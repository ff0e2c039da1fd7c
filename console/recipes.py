"""Recipes: a build's options in a YAML file, typed and versioned.

    version: 1
    build:                      # BuildRequest's names
      quantization: q4_k_m
      enable_streaming: true
    passes:
      without: [fuse-residual]
      options: {raise-rope: {probes: 4}}
    formats:                    # storage formats by name, role or layer; the first that holds wins
      - {match: "*.down_proj.weight", layers: 0-3, format: q6_k}    # a glob, or /a regex/
      - {role: attn_v, format: q8_0}
    golden:
      set: auto                 # auto, off, or a golden set's file or name
      thresholds: {mean_kl: 0.1}

Flags override what a recipe says. An unknown key, a wrong type or a key given twice is an error
with its line: a misspelt option must never be a silently different engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from ..compiler.assembly.overrides import CONDITIONS, Override
from ..compiler.assembly.request import BuildRequest
from ..errors import SpikeError

VERSION = 1
SHIPPED = Path(__file__).resolve().parent.parent / "recipes"
ELSEWHERE = ("model", "output_dir", "dump_ir", "dry_run", "calibration", "imatrix", "timing_cache",
             "golden", "thresholds", "without", "pass_options", "formats")  # fmt: skip
"""Of this run, or said in a section of their own."""
SECTIONS = ("version", "build", "passes", "formats", "golden")
NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Recipe:
    """A read recipe: options by BuildRequest's names, and where they came from."""

    path: Path
    options: Mapping[str, object] = field(default_factory=dict)


def shipped() -> list[str]:
    """Names of the recipes that come with SpikeInfer."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a recipe given by path or by the name of a shipped one.

    Raises:
        SpikeError: SPK810 with the nearest names.
    """
    for path in (Path(name), SHIPPED / f"{name}.yaml"):
        if path.is_file():
            return path
    near = [known for known in shipped() if known.startswith(name)]
    near = near or difflib.get_close_matches(Path(name).stem, shipped(), 1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise SpikeError(
        "SPK810",
        "recipe",
        f"there is no recipe {name}: neither a file nor one that comes with SpikeInfer.",
        f"{hint}Shipped: {', '.join(shipped())}.",
    )


def load(name: str) -> Recipe:
    """Read a recipe by path or name.

    Raises:
        SpikeError: SPK810 not found, SPK811 not YAML, SPK812 unknown key, SPK813 wrong type,
            SPK814 version, SPK815 key given twice; each with file and line.
    """
    path = find(name)
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        return Recipe(path, _Reader(path).read(root))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a value like !!int x
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        cause = getattr(error, "problem", None) or str(error)
        raise SpikeError(
            "SPK811", "recipe", f"{path}{line} isn't valid YAML: {cause}.", "Correct the file."
        ) from error


def option_types() -> dict[str, Any]:
    """What `build` may set: BuildRequest's fields and their types."""
    hints = get_type_hints(BuildRequest)
    return {name: hint for name, hint in hints.items() if name not in ELSEWHERE}


Entries = dict[str, tuple[int, yaml.Node]]


class _Reader:
    """Reads a composed document, whose nodes still know their lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, root: yaml.Node | None) -> dict[str, object]:
        """BuildRequest options of a whole recipe."""
        if root is None:
            raise self.error("SPK814", 1, "is empty", f"Begin it with `version: {VERSION}`.")
        top = self.entries(root, "the recipe", SECTIONS)
        self.check_version(top)
        options: dict[str, object] = {}
        types = option_types()
        for key, (_, node) in self.part(top, "build", types).items():
            options[key] = self.value(node, f"build.{key}", types[key])
        passes = self.part(top, "passes", ("without", "options"))
        if "without" in passes:
            options["without"] = self.names(passes["without"][1])
        if "options" in passes:
            options["pass_options"] = self.pass_options(passes["options"][1])
        if "formats" in top:
            options["formats"] = self.formats(top["formats"][1])
        golden = self.part(top, "golden", ("set", "thresholds"))
        if "set" in golden:
            options["golden"] = self.golden(golden["set"][1])
        if "thresholds" in golden:
            options["thresholds"] = self.thresholds(golden["thresholds"][1])
        return options

    def check_version(self, top: Entries) -> None:
        """Before anything else: another version may mean other keys."""
        line, node = top.get("version", (1, None))
        found = _plain(node) if node is not None else None
        if type(found) is not int or found != VERSION:
            said = "states no version" if node is None else f"has version {found!r}"
            what = f"{said}; this SpikeInfer reads version {VERSION}"
            raise self.error("SPK814", line, what, f"Write `version: {VERSION}`.")

    def part(self, top: Entries, name: str, known: Iterable[str]) -> Entries:
        """The entries of a section; none where it is left out."""
        return self.entries(top[name][1], name, known) if name in top else {}

    def entries(self, node: yaml.Node, where: str, known: Iterable[str] | None) -> Entries:
        """Key to (line, value) of a mapping whose keys are texts of `known`."""
        if not isinstance(node, yaml.MappingNode):
            raise self.wrong(node, where, "a mapping of names to values")
        found: Entries = {}
        for key_node, value in node.value:
            line, key = key_node.start_mark.line + 1, str(_plain(key_node))
            if known is not None and key not in known:
                raise self.unknown(line, key, where, known)
            if key in found:
                what = f"gives {key} twice (first on line {found[key][0]})"
                raise self.error("SPK815", line, what, "Remove one of them.")
            found[key] = (line, value)
        return found

    def value(self, node: yaml.Node, where: str, hint: Any) -> object:
        """A scalar of the type that `hint` names."""
        value = _plain(node)
        optional = isinstance(hint, UnionType) or get_origin(hint) is not None
        kinds = [k for k in get_args(hint) if k is not NoneType] if optional else [hint]
        if value is None and NoneType in get_args(hint):
            return None
        kind = kinds[0]
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        raise self.wrong(node, where, NAMES[kind])

    def names(self, node: yaml.Node) -> tuple[str, ...]:
        """A list of pass names."""
        value = _plain(node)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(node, "passes.without", "a list of pass names")
        return tuple(value)

    def pass_options(self, node: yaml.Node) -> dict[str, dict[str, object]]:
        """Options by pass name; the pipeline checks both against the passes themselves."""
        found = self.entries(node, "passes.options", None)
        return {
            name: {
                key: _plain(value)
                for key, (_, value) in self.entries(child, f"passes.options.{name}", None).items()
            }
            for name, (_, child) in found.items()
        }

    def formats(self, node: yaml.Node) -> tuple[Override, ...]:
        """Overrides in order."""
        if not isinstance(node, yaml.SequenceNode):
            raise self.wrong(node, "formats", "a list of overrides")
        return tuple(self.override(item) for item in node.value)

    def override(self, node: yaml.Node) -> Override:
        """One entry of `formats`; SPK820 with its line for a value that means nothing."""
        found = self.entries(node, "an override", ("format", *CONDITIONS))
        if "format" not in found:
            line = node.start_mark.line + 1
            raise self.error("SPK820", line, "an override has no format", "Add `format: q6_k`.")
        texts = {}
        for key, (_, value) in found.items():
            plain = _plain(value)  # YAML reads `layers: 3` as a number
            if not isinstance(plain, str) and not (key == "layers" and type(plain) is int):
                raise self.wrong(value, key, "a text")
            texts[key] = str(plain)
        line = node.start_mark.line + 1
        try:
            return Override(**texts, place=f"{self.path}, line {line}")
        except SpikeError as error:
            raise self.error(error.code, line, error.what.rstrip("."), error.remedy) from error

    def golden(self, node: yaml.Node) -> str:
        """``auto``, ``off`` (which YAML reads as false), or a file beside the recipe, or a name."""
        value = _plain(node)
        if value is False:
            return "off"
        if not isinstance(value, str):
            raise self.wrong(node, "golden.set", "auto, off, or a golden set's file")
        beside = self.path.parent / value
        return str(beside) if value not in ("auto", "off") and beside.is_file() else value

    def thresholds(self, node: yaml.Node) -> dict[str, float]:
        """Numbers by name; the golden gate checks the names."""
        found = self.entries(node, "golden.thresholds", None)
        return {
            name: float(str(self.value(child, f"golden.thresholds.{name}", float)))
            for name, (_, child) in found.items()
        }

    def wrong(self, node: yaml.Node, where: str, wanted: str) -> SpikeError:
        """SPK813."""
        value = _plain(node)
        shown = repr(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}"
        line = node.start_mark.line + 1
        return self.error("SPK813", line, f"{where} is {shown}", f"It must be {wanted}.")

    def unknown(self, line: int, key: str, where: str, known: Iterable[str]) -> SpikeError:
        """SPK812 with the nearest name."""
        names = sorted(known)
        near = difflib.get_close_matches(key.replace("-", "_"), names, 1)
        hint = f"Did you mean {near[0]}?" if near else f"It may hold: {', '.join(names)}."
        if key in ELSEWHERE[:4]:
            hint = f"Give it on the command line: --{key.replace('_', '-')}."
        return self.error("SPK812", line, f"{where} has no key {key}", hint)

    def error(self, code: str, line: int, what: str, remedy: str) -> SpikeError:
        """An error with its place."""
        return SpikeError(code, "recipe", f"{self.path}, line {line}: {what}.", remedy)


def _plain(node: yaml.Node) -> Any:
    """Plain Python data of a node (safe types only)."""
    return yaml.constructor.SafeConstructor().construct_object(node, deep=True)
