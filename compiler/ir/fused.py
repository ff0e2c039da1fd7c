"""Fused ops: what detection raises primitives to. Each function is the op's meaning in torch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from . import rules
from .ops import LOWERED, Kind, declare
from .types import Dim

ACTIVATIONS: dict[str, Any] = {
    "silu": functional.silu,
    "gelu_erf": functional.gelu,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


@declare(
    "rms_norm(x, weight?, *, eps: float, offset: float = 0.0)",
    rules.same,
    kind=Kind.LAST_AXIS,
    levels=LOWERED,
)
def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float, offset: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis"""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (weight + offset if offset else weight)


@declare(
    "layer_norm(x, weight?, bias?, *, eps: float)",
    rules.same,
    kind=Kind.LAST_AXIS,
)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis"""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _rotated(x: Tensor, style: str) -> Tensor:
    if style == "half":
        low, high = x.chunk(2, -1)
        return torch.cat((-high, low), -1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


@declare(
    'rope(x, cos, sin, *, style: str = "half")', rules.same, kind=Kind.LAST_AXIS, levels=LOWERED
)
def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """x * cos + rotate(x) * sin on the first R of D elements; cos, sin [..., R] broadcast to x"""
    width = cos.shape[-1]
    head, rest = x[..., :width], x[..., width:]
    return torch.cat((head * cos + _rotated(head, style) * sin, rest), -1)


def visible(queries: int, keys: int, window: int, chunk: int, causal: bool) -> Tensor:
    """bool [queries, keys]: which key each query sees; the last query stands at the last key."""
    i = torch.arange(keys - queries, keys).unsqueeze(1)
    j = torch.arange(keys).unsqueeze(0)
    seen = j <= i if causal else torch.ones(queries, keys, dtype=torch.bool)
    if window:
        seen = seen & (j > i - window)
    if chunk:
        seen = seen & (i // chunk == j // chunk)
    return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    sinks: Tensor | None,
    *,
    scale: float,
    softcap: float,
    slopes: tuple[float, ...],
) -> Tensor:
    """q [B, H, S, D], k [B, Hkv, L, D], v [B, Hkv, L, Dv], seen [S, L] -> [B, H, S, Dv].

    slopes: ALiBi (Press et al. 2022), one per head: logit += slope * (key's - query's position).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes:
        queries, keys = seen.shape
        distance = torch.arange(keys) - torch.arange(keys - queries, keys).unsqueeze(1)
        scores = scores + torch.tensor(slopes).reshape(-1, 1, 1) * distance
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]]
    return torch.matmul(weights, v)


@declare(
    "attention(q, k, v, sinks?, *, scale: float, causal: bool = True, window: int = 0, "
    "chunk: int = 0, softcap: float = 0.0, slopes: floats = ())",
    rules.attention,
    levels=LOWERED,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
    window: int,
    chunk: int,
    softcap: float,
    slopes: tuple[float, ...],
) -> Tensor:
    """softmax(scale q k^T, masked) v; q [B, H, S, D]; k, v [B, Hkv, L, D]; query i at L - S + i"""
    seen = visible(q.shape[2], k.shape[2], window, chunk, causal)
    return attend(q, k, v, seen, sinks, scale=scale, softcap=softcap, slopes=slopes)


def _needs_states(op: str) -> RuntimeError:
    return RuntimeError(f"{op} reads and writes states: the interpreter runs it")


@declare(
    "kv_append(new, *, state: str, axis: int, past: dim)",
    rules.appended,
    levels=LOWERED,
    effect=True,
)
def kv_append(new: Tensor, *, state: str, axis: int, past: Dim) -> Tensor:
    """writes the new rows behind the state's past in place; the result is past and new"""
    raise _needs_states("kv_append")


@declare(
    "paged_attention(q, k, v, slots, seq_starts, kv_lens, block_tables, sinks?, *, key: str, "
    "value: str, scale: float, window: int = 0, chunk: int = 0, softcap: float = 0.0, "
    "slopes: floats = ())",
    rules.paged_attention,
    levels=LOWERED,
    effect=True,
)
def paged_attention(*_: Any, **__: Any) -> Tensor:
    """attention of flat tokens [T, H, D] over paged states, after writing k and v to their slots"""
    raise _needs_states("paged_attention")


@declare(
    "linear_residual(x, weight, residual, bias?)", rules.linear, kind=Kind.LAST_AXIS, levels=LOWERED
)
def linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None
) -> Tensor:
    """residual + x weight^T + bias"""
    return residual + functional.linear(x, weight, bias)


def gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str,
    limit: float = 0.0,
    alpha: float = 1.0,
) -> Tensor:
    """act(gate(x)) * up(x), which the last matrix of an MLP sees; x [..., K], gate, up [M, K].

    With a `limit`: act(alpha * min(g, limit)) / alpha * (clamp(u, -limit, limit) + 1).
    """
    g, u = functional.linear(x, gate, gate_bias), functional.linear(x, up, up_bias)
    if limit:
        g, u = alpha * g.clamp(max=limit), (u.clamp(-limit, limit) + 1) / alpha
    return cast("Tensor", ACTIVATIONS[activation](g) * u)


@declare(
    'gated_mlp(x, gate, up, down, extras*, *, activation: str = "silu", biases: bool = False)',
    rules.gated_mlp,
    kind=Kind.LAST_AXIS,
    levels=LOWERED,
)
def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *extras: Tensor,
    activation: str,
    biases: bool,
) -> Tensor:
    """residual + down(act(gate(x)) * up(x)); extras: the biases of all three, then a residual"""
    of_gate, of_up, of_down = extras[:3] if biases else (None, None, None)
    hidden = gated(x, gate, up, of_gate, of_up, activation=activation)
    result = functional.linear(hidden, down, of_down)
    residual = extras[3 if biases else 0 :]
    return residual[0] + result if residual else result


@declare("qkv(x, q, k, v, biases*)", rules.qkv, kind=Kind.LAST_AXIS, levels=LOWERED, results=3)
def qkv(
    x: Tensor, q: Tensor, k: Tensor, v: Tensor, *biases: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x q^T, x k^T and x v^T, with the biases of all three or of none"""
    of_q, of_k, of_v = biases or (None, None, None)
    return (
        functional.linear(x, q, of_q),
        functional.linear(x, k, of_k),
        functional.linear(x, v, of_v),
    )
