"""A decoder of two layers as IR text, with what emission can get wrong in it.

Layer 0 has a window, biases and norms on queries and keys, layer 1 neither; both have grouped
heads, a gated MLP and int4 matrices; logits are soft-capped. Matrices are square where a
transposition would otherwise show by its shape.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from spikeinfer.compiler.backends.tensorrt import INT4_FORMAT, Int4Matrix, Target
from spikeinfer.compiler.ir import Graph, parse_graph

WIDTH, HEADS, KV_HEADS, HEAD, VOCAB, CAPACITY = 64, 2, 1, 32, 96, 24
KV = KV_HEADS * HEAD
WINDOWS = (8, 0)
TARGET = Target(("sm89",), capacity=CAPACITY, max_batch_size=2, max_num_tokens=8)
MATRICES = {"q": (WIDTH, WIDTH), "k": (KV, WIDTH), "v": (KV, WIDTH), "o": (WIDTH, WIDTH),
            "gate": (WIDTH, WIDTH), "up": (WIDTH, WIDTH), "down": (WIDTH, WIDTH)}  # fmt: skip

Values = Mapping[str, npt.NDArray[np.float32] | Int4Matrix]

_HEAD = """graph tiny placed {{
  input %tokens : i64[B, S]
  input %positions : i64[B, S]
{constants}
{states}
  %x0 = embedding(@embed, %tokens) : f32[B, S, 64] as f16
  %p = reshape(%positions, shape=[B, S, 1]) : i64[B, S, 1]
  %pf = cast(%p, dtype=f32) : f32[B, S, 1]
  %angle = mul(%pf, @inv_freq) : f32[B, S, 16]
  %both = concat(%angle, %angle, axis=2) : f32[B, S, 32]
  %cos = cos(%both) : f32[B, S, 32] as f16
  %sin = sin(%both) : f32[B, S, 32] as f16
  %c = reshape(%cos, shape=[B, S, 1, 32]) : f32[B, S, 1, 32] as f16
  %s = reshape(%sin, shape=[B, S, 1, 32]) : f32[B, S, 1, 32] as f16
"""
_LAYER = """
  %n{i} = rms_norm(%x{i}, @norm{i}, eps=1e-05) : f32[B, S, 64] as f16 in layers.{i}.norm
  %q{i} = linear(%n{i}, @q{i}{bias_q}) : f32[B, S, 64] as f16 in layers.{i}.q
  %k{i} = linear(%n{i}, @k{i}{bias_k}) : f32[B, S, 32] as f16 in layers.{i}.k
  %v{i} = linear(%n{i}, @v{i}) : f32[B, S, 32] as f16 in layers.{i}.v
  %qh{i} = reshape(%q{i}, shape=[B, S, 2, 32]) : f32[B, S, 2, 32] as f16
  %kh{i} = reshape(%k{i}, shape=[B, S, 1, 32]) : f32[B, S, 1, 32] as f16
  %vh{i} = reshape(%v{i}, shape=[B, S, 1, 32]) : f32[B, S, 1, 32] as f16
{norms}
  %qr{i} = rope(%{qn}, %c, %s) : f32[B, S, 2, 32] as f16 in layers.{i}.attn
  %kr{i} = rope(%{kn}, %c, %s) : f32[B, S, 1, 32] as f16 in layers.{i}.attn
  %qt{i} = transpose(%qr{i}, perm=[0, 2, 1, 3]) : f32[B, 2, S, 32] as f16
  %kt{i} = transpose(%kr{i}, perm=[0, 2, 1, 3]) : f32[B, 1, S, 32] as f16
  %vt{i} = transpose(%vh{i}, perm=[0, 2, 1, 3]) : f32[B, 1, S, 32] as f16
  %ka{i} = kv_append(%kt{i}, state="layers.{i}.key", axis=2, past=P) : f32[B, 1, P+S, 32]
  %va{i} = kv_append(%vt{i}, state="layers.{i}.value", axis=2, past=P) : f32[B, 1, P+S, 32]
  %a{i} = attention(%qt{i}, %ka{i}, %va{i}, scale=0.2{attn}) : f32[B, 2, S, 32] as f16
  %at{i} = transpose(%a{i}, perm=[0, 2, 1, 3]) : f32[B, S, 2, 32] as f16
  %ar{i} = reshape(%at{i}, shape=[B, S, 64]) : f32[B, S, 64] as f16
  %o{i} = linear(%ar{i}, @o{i}) : f32[B, S, 64] as f16 in layers.{i}.o
  %y{i} = add(%x{i}, %o{i}) : f32[B, S, 64] as f16
  %m{i} = rms_norm(%y{i}, @mlp_norm{i}, eps=1e-05) : f32[B, S, 64] as f16
  %g{i} = linear(%m{i}, @gate{i}) : f32[B, S, 64] as f16 in layers.{i}.gate
  %u{i} = linear(%m{i}, @up{i}) : f32[B, S, 64] as f16 in layers.{i}.up
  %act{i} = gelu(%g{i}, approximate="tanh") : f32[B, S, 64] as f16
  %h{i} = mul(%act{i}, %u{i}) : f32[B, S, 64] as f16
  %d{i} = linear(%h{i}, @down{i}) : f32[B, S, 64] as f16 in layers.{i}.down
  %x{next} = add(%y{i}, %d{i}) : f32[B, S, 64] as f16
"""
_TAIL = """
  %final = rms_norm(%x2, @final_norm, eps=1e-05) : f32[B, S, 64] as f16
  %l = linear(%final, @head) : f32[B, S, 96] as f16 in head
  %div = div(%l, 3.0) : f32[B, S, 96] as f16
  %tanh = tanh(%div) : f32[B, S, 96] as f16
  %logits = mul(%tanh, 3.0) : f32[B, S, 96]
  output %logits
}}
"""


def graph(*, int4: bool = True, attn: tuple[str, str] = ("", ""), sinks: bool = False) -> Graph:
    """The placed graph; `attn` adds attributes to both attentions, `sinks` sinks to the first."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB, WIDTH), "head": (VOCAB, WIDTH)}
    vectors = {"final_norm": WIDTH, "q_norm": HEAD, "k_norm": HEAD, "bias_q": WIDTH, "bias_k": KV}
    if sinks:
        vectors["sinks"] = HEADS
    for i in (0, 1):
        shapes |= {f"{name}{i}": shape for name, shape in MATRICES.items()}
        vectors |= {f"norm{i}": WIDTH, f"mlp_norm{i}": WIDTH}
    kept = INT4_FORMAT if int4 else "f16"
    lines = [f'  const @inv_freq : f32[16] = data "{_inverse_frequencies()}" format=f32']
    for name, shape in shapes.items():
        storage = "f16" if name in ("embed", "head") else kept
        lines.append(f'  const @{name} : f32{list(shape)} = parameter "{name}" format={storage}')
    for name, width in vectors.items():
        lines.append(f'  const @{name} : f32[{width}] = parameter "{name}" format=array')
    states = [
        f"  state layers.{i}.{part} : f32[B, 1, P, 32] axis=2 kind=kv format=f16"
        for i in (0, 1)
        for part in ("key", "value")
    ]
    text = _HEAD.format(constants="\n".join(lines), states="\n".join(states))
    text += _layer(0, f", window={WINDOWS[0]}{attn[0]}", sinks) + _layer(1, attn[1], False)
    return parse_graph(text + _TAIL.format())


def _layer(i: int, attn: str, sinks: bool) -> str:
    norms = ""
    if i == 0:
        norms = (
            "  %qn0 = rms_norm(%qh0, @q_norm, eps=1e-05) : f32[B, S, 2, 32] as f16\n"
            "  %kn0 = rms_norm(%kh0, @k_norm, eps=1e-05) : f32[B, S, 1, 32] as f16"
        )
    text = _LAYER.format(
        i=i,
        next=i + 1,
        norms=norms,
        attn=attn,
        qn="qn0" if i == 0 else "qh1",
        kn="kn0" if i == 0 else "kh1",
        bias_q=", @bias_q" if i == 0 else "",
        bias_k=", @bias_k" if i == 0 else "",
    )
    return text.replace("%va0, scale", "%va0, @sinks, scale") if sinks else text


def _inverse_frequencies() -> str:
    return base64.b64encode((100.0 ** -(np.arange(16) / 16)).astype("<f4").tobytes()).decode()


def constants(graph: Graph) -> Callable[[str], Any]:
    """Random values for every constant; int4 blocks where the format says so."""
    values: dict[str, Any] = {}
    for name, const in graph.constants.items():
        source = np.random.default_rng(zlib.crc32(name.encode()))
        shape = tuple(int(d) for d in const.shape)
        plain = source.normal(0.0, 0.3, shape).astype(np.float32)
        if const.data is not None:
            plain = np.asarray(const.data, np.float32)
        elif "norm" in name:
            plain += 1.0
        values[name] = blocks(plain) if const.format == INT4_FORMAT else plain
    return values.__getitem__


def blocks(matrix: npt.NDArray[np.float32]) -> Int4Matrix:
    """A matrix [N, K] in blocks of 32, rounded to the nearest of 15 values."""
    n, k = matrix.shape
    parts = matrix.reshape(n, k // 32, 32)
    scales = (np.abs(parts).max(-1) / 7).astype(np.float16)
    nibbles = np.rint(parts / scales[..., None].astype(np.float32)).clip(-8, 7)
    flat = nibbles.astype(np.int8).reshape(n, k) & 15
    return Int4Matrix((flat[:, 0::2] | flat[:, 1::2] << 4).astype(np.uint8), scales)
