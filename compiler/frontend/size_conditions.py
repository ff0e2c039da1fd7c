"""Conditions on sizes that a trace rests on, checked over the sizes that may occur.

torch.export can leave what it cannot prove as assertions in the graph, such as
``min(16 + 16 P, 32 + 32 P) == 16 + 16 P``. They are polynomials with minima, maxima and remainders,
so a grid over small and large sizes shows those that do not always hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import sympy
from torch.export import ExportedProgram

BATCHES = (1, 2, 3, 8)
STEPS = (*range(1, 10), 16, 17, 31, 64, 255)
PASTS = (*range(10), 15, 16, 63, 64, 127, 1000)
LONGEST = 8192


Sizes = tuple[int, int, int]  # batch, tokens, past


def broken_conditions(
    exported: ExportedProgram, names: Sequence[str], max_positions: int | None
) -> list[tuple[Any, Sizes]]:
    """Asserted conditions that some sizes break, each with the first such sizes.

    Args:
        names: which of B, S and P are symbolic.
        max_positions: longest sequence that will occur; 8192 if None.
    """
    symbols = _symbols(exported)
    grid = [
        sizes
        for sizes in product(BATCHES, STEPS if "S" in names else (1,), PASTS)
        if sizes[1] + sizes[2] <= (max_positions or LONGEST)
    ]
    broken = []
    for condition in _conditions(exported):
        for sizes in grid:
            # At once, not one after the other: torch's symbols are positive, and P may be 0.
            values = {s: sympy.Integer(sizes["BSP".index(n)]) for s, n in symbols.items()}
            if condition.xreplace(values) == sympy.false:
                broken.append((condition, sizes))
                break
    return broken


def _conditions(exported: ExportedProgram) -> Iterator[Any]:
    """Expressions of the assertions in the graph."""
    for node in exported.graph.nodes:
        if node.op != "call_function" or "_assert_scalar" not in str(node.target):
            continue
        asserted = node.args[0].meta["val"] if hasattr(node.args[0], "meta") else node.args[0]
        if hasattr(asserted, "node"):
            yield sympy.sympify(asserted.node.expr)


def _symbols(exported: ExportedProgram) -> dict[Any, str]:
    """torch's symbol -> B, S or P, read off the inputs."""
    names: dict[Any, str] = {}
    given = set(exported.graph_signature.user_inputs)
    inputs = [n for n in exported.graph.nodes if n.op == "placeholder" and n.name in given]
    for index, node in enumerate(inputs):
        axes = {0: "B", 1: "S"} if index < 2 else {0: "B", 2: "P"}
        for axis, name in axes.items():
            shape = node.meta["val"].shape
            if axis < len(shape) and hasattr(shape[axis], "node"):
                names[shape[axis].node.expr] = name
    return names
