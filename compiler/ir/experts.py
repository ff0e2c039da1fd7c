"""Mixture of experts: choosing experts for each token, and running the chosen ones."""

from __future__ import annotations

import torch
from torch import Tensor

from . import rules
from .fused import gated
from .ops import LOWERED, Kind, declare

SCORES = {
    "softmax": lambda x: torch.softmax(x, -1),
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
}


def in_best_groups(choice: Tensor, groups: int, best: int, per_group: int) -> Tensor:
    """choice [..., E] with -inf outside of the `best` groups by sum of their top `per_group`."""
    grouped = choice.unflatten(-1, (groups, -1))
    totals = grouped.topk(per_group, -1).values.sum(-1)
    kept = torch.zeros_like(totals).scatter(-1, totals.topk(best, -1).indices, 1).bool()
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


@declare(
    'route(logits, correction?, *, k: int, scores: str = "softmax", groups: int = 1, '
    "best_groups: int = 1, per_group: int = 1, softmax_chosen: bool = False, "
    "normalise: bool = False, eps: float = 0.0, floor: float = 0.0, scale: float = 1.0)",
    rules.route,
    kind=Kind.LAST_AXIS,
    levels=LOWERED,
    results=2,
)
def route(
    logits: Tensor,
    correction: Tensor | None = None,
    *,
    k: int,
    scores: str,
    groups: int,
    best_groups: int,
    per_group: int,
    softmax_chosen: bool,
    normalise: bool,
    eps: float,
    floor: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """weights and ids i64 [..., k] of the experts chosen from logits [..., E]

    The k largest of scores + correction [E] are chosen, of the `best_groups` groups only; the
    weights are the scores without the correction, divided by max(their sum + eps, floor) if
    `normalise`.
    """
    values = SCORES[scores](logits)
    choice = values if correction is None else values + correction
    if groups > 1:
        choice = in_best_groups(choice, groups, best_groups, per_group)
    ids = choice.topk(k, -1).indices
    weights = values.gather(-1, ids)
    if softmax_chosen:
        weights = torch.softmax(weights, -1)
    if normalise:
        total = weights.sum(-1, keepdim=True) + eps
        weights = weights / (total.clamp(min=floor) if floor else total)
    return weights * scale, ids


@declare(
    "moe(x, weights, ids, gate, up, down, gate_bias?, up_bias?, down_bias?, *, "
    'activation: str = "silu", limit: float = 0.0, alpha: float = 1.0)',
    rules.moe,
    levels=LOWERED,
)
def moe(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str,
    limit: float,
    alpha: float,
) -> Tensor:
    """sum over j of weights[..., j] * down(act(gate(x)) * up(x)) of stacked expert ids[..., j]

    x [..., K], weights and ids [..., k], gate and up [E, M, K], down [E, N, M]; with a `limit` the
    product is act(alpha * min(g, limit)) / alpha * (clamp(u, -limit, limit) + 1).
    """
    tokens, chosen = x.reshape(-1, x.shape[-1]), ids.reshape(-1, ids.shape[-1])
    factors = weights.reshape(chosen.shape)
    result = tokens.new_zeros(len(tokens), down.shape[1])
    for expert in chosen.unique().tolist():
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        hidden = gated(
            tokens[token], gate[expert], up[expert],
            _of(gate_bias, expert), _of(up_bias, expert),
            activation=activation, limit=limit, alpha=alpha,
        )  # fmt: skip
        part = torch.nn.functional.linear(hidden, down[expert], _of(down_bias, expert))
        result.index_add_(0, token, part * factors[token, slot].unsqueeze(-1))
    return result.reshape(*x.shape[:-1], -1)


def _of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]
