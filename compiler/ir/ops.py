"""Op declarations: one per op, from which printer, parser, verifier, docs and interpreter follow.

A declaration is a signature such as ``"rms_norm(x, weight, *, eps: float, offset: float = 0)"``, a
one-line meaning, a rule that gives the result types, and a reference function in torch. `Op.kind`
says how the op treats the axes of its first operand; token-wise proofs rely on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .graph import Attr, Level, Node, Operand
from .types import DType, SymDim, TensorType

Rule = Callable[[Node], list[TensorType]]
Reference = Callable[..., Any]
EVERY_LEVEL = (Level.TRACED, Level.FUSED, Level.PLACED)
LOWERED = (Level.FUSED, Level.PLACED)


class Kind(Enum):
    """How results relate to the axes of the operands."""

    ELEMENTWISE = "elementwise"  # each result element needs the broadcast elements only
    LAST_AXIS = "last_axis"  # mixes the last axis only; all other axes are independent
    SHAPE = "shape"  # moves elements, computes none
    OTHER = "other"  # a pass must know the op


@dataclass(frozen=True)
class AttrSpec:
    """Type and default of one attribute; `required` if it has no default."""

    type: str
    default: Attr | None = None
    required: bool = True


@dataclass(frozen=True)
class Op:
    """The declaration of one op.

    Args:
        operands: names in order; ``x?`` is optional at the end, ``xs*`` takes the rest.
        attrs: attributes by name.
        doc: what it computes, one line.
        rule: result types of a node; raises ValueError with the reason if operands do not fit.
        reference: the meaning, in torch: tensors in, tensor or tuple of tensors out.
        effect: writes a state, so that it is never dead.
    """

    name: str
    operands: tuple[str, ...]
    attrs: dict[str, AttrSpec]
    doc: str
    rule: Rule
    reference: Reference
    kind: Kind
    levels: tuple[Level, ...]
    effect: bool = False
    results: int = field(default=1)

    def accepts(self, count: int) -> bool:
        """Whether the op takes that many operands."""
        least = sum(not name.endswith(("?", "*")) for name in self.operands)
        most = 10**9 if any(n.endswith("*") for n in self.operands) else len(self.operands)
        return least <= count <= most


OPS: dict[str, Op] = {}

_ATTR = re.compile(r"(\w+):\s*(\w+)(?:\s*=\s*([^\s,]+))?")
_DEFAULTS: dict[str, Attr | None] = {"True": True, "False": False, "None": None, "()": ()}


def _default(text: str, kind: str) -> Attr | None:
    if text in _DEFAULTS:
        return _DEFAULTS[text]
    if kind == "str":
        return text.strip('"')
    return float(text) if kind == "float" else int(text)


def _attr_specs(text: str) -> dict[str, AttrSpec]:
    specs = {}
    for name, kind, default in _ATTR.findall(text):
        specs[name] = AttrSpec(kind, _default(default, kind) if default else None, not default)
    return specs


def declare(
    signature: str,
    rule: Rule,
    *,
    kind: Kind = Kind.OTHER,
    levels: tuple[Level, ...] = EVERY_LEVEL,
    effect: bool = False,
    results: int = 1,
) -> Callable[[Reference], Reference]:
    """Registers the decorated reference function as the op that `signature` describes."""
    match = re.fullmatch(r"(\w+)\((.*)\)", signature, re.DOTALL)
    if match is None:
        raise ValueError(f"not a signature: {signature!r}")
    before, *after = re.split(r"(?:^|,\s*)\*,", match[2], maxsplit=1)
    operands = tuple(o.strip() for o in before.split(",") if o.strip())

    def register(reference: Reference) -> Reference:
        doc = (reference.__doc__ or "").strip().split("\n")[0]
        if match[1] in OPS or not doc:
            raise ValueError(f"op {match[1]} is declared twice or has no docstring")
        specs = _attr_specs("".join(after))
        OPS[match[1]] = Op(
            match[1], operands, specs, doc, rule, reference, kind, levels, effect, results
        )
        return reference

    return register


def op_of(node: Node) -> Op:
    """The node's declaration; ValueError names an unknown op."""
    try:
        return OPS[node.op]
    except KeyError:
        raise ValueError(f"unknown op {node.op!r}") from None


def attribute(node: Node, name: str) -> Any:
    """An attribute's value, or the declared default when the node leaves it out."""
    if name in node.attrs:
        return node.attrs[name]
    return op_of(node).attrs[name].default


def has_effect(node: Node) -> bool:
    """Whether the node writes a state."""
    return node.op in OPS and OPS[node.op].effect


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "bool": lambda v: isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "dtype": lambda v: isinstance(v, DType),
    "dim": lambda v: isinstance(v, int | SymDim) and not isinstance(v, bool),
    "scalar": lambda v: isinstance(v, int | float | bool | SymDim),
    "ints": lambda v: isinstance(v, tuple) and all(isinstance(i, int) for i in v),
    "floats": lambda v: isinstance(v, tuple) and all(isinstance(i, int | float) for i in v),
    "dims": lambda v: isinstance(v, tuple) and all(isinstance(i, int | SymDim) for i in v),
}


def check_attrs(node: Node) -> None:
    """Raises ValueError if an attribute is unknown, missing or of the wrong type."""
    specs = op_of(node).attrs
    for name, value in node.attrs.items():
        if name not in specs:
            raise ValueError(f"{node.op} has no attribute {name!r}")
        if not _CHECKS[specs[name].type](value):
            raise ValueError(f"{node.op}.{name} = {value!r} is not a {specs[name].type}")
    missing = [n for n, s in specs.items() if s.required and n not in node.attrs]
    if missing:
        raise ValueError(f"{node.op} lacks {', '.join(missing)}")


def infer(node: Node) -> list[TensorType]:
    """Result types by the op's rule; ValueError gives the reason when the operands do not fit."""
    declaration = op_of(node)
    if not declaration.accepts(len(node.operands)):
        raise ValueError(f"{node.op} does not take {len(node.operands)} operands")
    check_attrs(node)
    return declaration.rule(node)


def dtype_of(operand: Operand) -> DType:
    """An operand's dtype; a literal counts as bool, i64 or f32."""
    if isinstance(operand, bool):
        return DType.BOOL
    if isinstance(operand, int):
        return DType.I64
    return DType.F32 if isinstance(operand, float) else operand.dtype
