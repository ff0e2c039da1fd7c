"""What an attention mask means, found by evaluating it.

A mask that depends on dimensions only is run at several past and step lengths and compared with
full, causal, sliding-window and chunked visibility. What it adds to visible scores may only be
ALiBi, a slope per head times the key's position (softmax ignores a constant per row). Widths to try
are the integers that the mask's own subgraph mentions (and their neighbours, for < against <=),
each at lengths that cross it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..compiler.ir import Dim, Node, Shape, SymDim, Value, evaluate_dim
from ..compiler.ir.fused import visible
from .probe import cone, evaluate, integers_of, symbols_of

HIDDEN = -1e4  # e^-10000 is 0 in fp32, so that anything below it hides a key
MAX_WIDTH = 1 << 20
_PLAIN = ((0, 1), (0, 5), (3, 1), (4, 3))
_FAR = (1021, 6)
"""Past and step at which a bias that was rounded to half precision is no line any more."""


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
    slopes: tuple[float, ...] = ()

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
    slopes: list[tuple[float, ...]] = []
    for past, step in (*_lengths(widths), _FAR):
        sizes = _sizes(symbols, scores, past, step)
        try:
            seen, bias = _seen(terms, nodes, scores, sizes)
        except RuntimeError:  # torch's word for shapes that do not fit
            raise UnknownMaskError(
                f"its mask ends before a step of {step} tokens after {past}"
            ) from None
        slopes.append(_slopes(bias, seen))
        left = [c for c in left if torch.equal(c.table(*seen.shape), seen)]
        if not left:
            raise UnknownMaskError(
                f"its mask is not full, causal, a window or chunks ({step} tokens after {past})"
            )
    return replace(left[0], slopes=_common(slopes))


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [S, L]: the keys that no term hides, alike for all; f32 [H, S, L]: what is added."""
    heads, queries, keys = (evaluate_dim(d, sizes) for d in scores[1:])
    shown = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    bias = torch.zeros(1, heads, queries, keys)
    tables = evaluate([t.value for t in terms], nodes, {}, sizes)
    for term, table in zip(terms, tables, strict=True):
        if term.kind == "add":
            bias = bias + table
            table = table > HIDDEN
        shown = shown & (table if term.kind != "drop" else ~table)
    if not bool((shown == shown[:1, :1]).all() and (bias == bias[:1]).all()):
        raise UnknownMaskError("its mask is not the same for all sequences and heads")
    return shown[0, 0], bias[0]


def _slopes(bias: torch.Tensor, seen: torch.Tensor) -> tuple[float, ...]:
    """The factor of j in a bias [H, S, L] = slope[h] * j + anything[h, i]; () if it is zero.

    Raises UnknownMaskError if the visible scores get any other bias.
    """
    visible_bias = bias.masked_fill(~seen, 0.0)
    if not bool(visible_bias.any()):
        return ()
    row = int(seen.sum(1).argmax())
    keys = seen[row].nonzero().flatten()
    first, last = int(keys[0]), int(keys[-1])
    slopes = (bias[:, row, last] - bias[:, row, first]) / max(1, last - first)
    line = slopes.reshape(-1, 1, 1) * torch.arange(bias.shape[2])
    rest = bias - line
    start = seen.int().argmax(1).reshape(1, -1, 1).expand(len(rest), -1, 1)
    wrong = (rest - rest.gather(2, start)).masked_fill(~seen, 0.0).abs()
    if bool((wrong > 1e-6 * visible_bias.abs().max()).any()):
        raise UnknownMaskError("its mask adds to some scores what is no slope times a distance")
    return tuple(slopes.tolist())


def _common(found: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The slopes that all lengths agree on; a lone key shows none."""
    slopes = next((s for s in reversed(found) if any(s)), ())
    for other in found:
        if any(abs(a - b) > 1e-5 * abs(a) for a, b in zip(slopes, other, strict=False) if b):
            raise UnknownMaskError("its mask adds a bias whose slope depends on the length")
    return slopes
