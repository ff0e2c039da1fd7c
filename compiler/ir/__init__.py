"""The intermediate representation: a small, closed, typed SSA form of a decoder model.

types -> graph -> ops, rules -> primitives, fused, experts -> text, verify, interpret, build.
"""

from __future__ import annotations

from . import experts, fused, primitives
from .build import Builder
from .graph import (
    Attr,
    Constant,
    Graph,
    Level,
    Node,
    Operand,
    State,
    Tensor,
    Users,
    Value,
    topological,
)
from .interpret import Interpreter, PagedState, Parameters, constant_tensor
from .ops import OPS, Kind, Op, attribute, has_effect, infer, op_of
from .text import IrSyntaxError, parse_graph, print_graph, print_node
from .types import (
    HALVES,
    Dim,
    DType,
    Shape,
    SymDim,
    TensorType,
    choices,
    evaluate_dim,
    extreme,
    parse_dim,
    symbol,
)
from .verify import VerifyError, verify, violations

__all__ = [
    "HALVES",
    "OPS",
    "Attr",
    "Builder",
    "Constant",
    "DType",
    "Dim",
    "Graph",
    "Interpreter",
    "IrSyntaxError",
    "Kind",
    "Level",
    "Node",
    "Op",
    "Operand",
    "PagedState",
    "Parameters",
    "Shape",
    "State",
    "SymDim",
    "Tensor",
    "TensorType",
    "Users",
    "Value",
    "VerifyError",
    "attribute",
    "choices",
    "constant_tensor",
    "evaluate_dim",
    "experts",
    "extreme",
    "fused",
    "has_effect",
    "infer",
    "op_of",
    "parse_dim",
    "parse_graph",
    "primitives",
    "print_graph",
    "print_node",
    "symbol",
    "topological",
    "verify",
    "violations",
]
