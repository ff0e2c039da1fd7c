"""What an attention mask means, found by evaluating it.

A mask that depends on dimensions only is run at several past and step lengths and compared with
full, causal, sliding-window and chunked visibility. Widths to try are the integers that the mask's
own subgraph mentions (and their neighbours, for < against <=), each at lengths that cross it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..compiler.ir import Dim, Node, Shape, SymDim, Value, evaluate_dim
from ..compiler.ir.fused import visible
from .probe import cone, evaluate, integers_of, symbols_of

HIDDEN = -1e4  # e^-10000 is 0 in fp32, so that anything below it hides a key
MAX_WIDTH = 1 << 20
_PLAIN = ((0, 1), (0, 5), (3, 1), (4, 3))


@dataclass(frozen=True)
class MaskTerm:
    """One tensor that hides keys: by ``add``, or by a condition that says what to ``keep``."""

    value: Value
    kind: str


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees; 0 is no limit."""

    causal: bool = True
    window: int = 0
    chunk: int = 0

    def table(self, queries: int, keys: int) -> torch.Tensor:
        """bool [queries, keys]."""
        return visible(queries, keys, self.window, self.chunk, self.causal)


class UnknownMaskError(ValueError):
    """A mask that is none of the known kinds; the message says why."""


def classify(terms: Sequence[MaskTerm], scores: Shape) -> Visibility:
    """What the masks of scores [B, H, S, L] hide together.

    Raises UnknownMaskError with the reason if it is not full, causal, a window or chunks.
    """
    if not terms:
        return Visibility(causal=False)
    nodes, leaves = cone([t.value for t in terms], lambda n: True)
    if leaves:
        names = ", ".join(f"%{v.name}" for v in leaves)
        raise UnknownMaskError(f"its mask depends on {names}, not on lengths alone")
    symbols = symbols_of([t.value for t in terms], nodes) | _symbols(scores[2:])
    widths = sorted(i for i in integers_of(nodes) if 1 < i <= MAX_WIDTH)
    left = list(_candidates(widths))
    for past, step in _lengths(widths):
        sizes = _sizes(symbols, scores, past, step)
        seen = _seen(terms, nodes, scores, sizes)
        left = [c for c in left if torch.equal(c.table(*seen.shape), seen)]
        if not left:
            raise UnknownMaskError(
                f"its mask is not full, causal, a window or chunks ({step} tokens after {past})"
            )
    return left[0]


def _candidates(widths: Sequence[int]) -> Iterator[Visibility]:
    yield Visibility(causal=False)
    yield Visibility()
    near = sorted({w + d for w in widths for d in (-1, 0, 1) if w + d > 0})
    yield from (Visibility(window=w) for w in near)
    yield from (Visibility(chunk=w) for w in widths)


def _lengths(widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Past and step lengths; for each width some where the first keys go out of sight."""
    yield from _PLAIN
    for width in widths:
        yield from ((max(width - 3, 0), 7), (max(2 * width - 3, 0), 7))


def _sizes(symbols: frozenset[str], scores: Shape, past: int, step: int) -> dict[str, int]:
    new = _symbols(scores[2:3])
    old = _symbols(scores[3:4]) - new
    if len(new) != 1 or len(old) > 1:
        raise UnknownMaskError(f"its scores [.., {scores[2]}, {scores[3]}] are not [S, past + S]")
    sizes = dict.fromkeys(sorted(symbols), 2)
    return sizes | dict.fromkeys(new, step) | dict.fromkeys(old, past)


def _symbols(dims: Sequence[Dim]) -> frozenset[str]:
    return frozenset(s for d in dims if isinstance(d, SymDim) for s in d.symbols)


def _seen(
    terms: Sequence[MaskTerm], nodes: Sequence[Node], scores: Shape, sizes: dict[str, int]
) -> torch.Tensor:
    """bool [S, L]: the keys that no term hides, the same for every sequence and head."""
    queries, keys = (evaluate_dim(d, sizes) for d in scores[2:])
    shown = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    tables = evaluate([t.value for t in terms], nodes, {}, sizes)
    for term, table in zip(terms, tables, strict=True):
        if term.kind == "add":
            if bool(((table != 0) & (table > HIDDEN)).any()):
                raise UnknownMaskError("its mask adds a bias to some scores, such as ALiBi")
            table = table == 0
        shown = shown & (table if term.kind != "drop" else ~table)
    if not bool((shown == shown[:1, :1]).all()):
        raise UnknownMaskError("its mask is not the same for all heads")
    return shown[0, 0]
