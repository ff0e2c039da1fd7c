"""Attention over a paged cache, against a dense float64 softmax over the decoded pool."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import onnxruntime as ort
import pytest

# fp32 sums of a few hundred terms of size one; exp and tanh approximations of 2 ulp.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    kv_format: str = "f16"
    sinks: bool = False
    block_size: int = 16
    scale: float = 0.17


INPUTS = {
    "q": "f32",
    "k": "f32",
    "v": "f32",
    "key_pool": "u8",
    "value_pool": "u8",
    "slots": "i32",
    "seq_starts": "i32",
    "kv_lens": "i32",
    "block_tables": "i32",
}


def row_bytes(kv_format: str, dim: int) -> int:
    return {"f32": 4 * dim, "f16": 2 * dim, "int8": dim // 32 * 34, "int4": dim // 32 * 20}[
        kv_format
    ]


def decode(rows: np.ndarray, kv_format: str) -> np.ndarray:
    """The values of pool rows u8[..., row_bytes], as the op's documentation defines them."""
    lead = rows.shape[:-1]
    if kv_format in ("f32", "f16"):
        kind = np.float32 if kv_format == "f32" else np.float16
        return np.ascontiguousarray(rows).view(kind).astype(np.float64)
    groups = rows.reshape(*lead, -1, 34 if kv_format == "int8" else 20)
    scale = np.ascontiguousarray(groups[..., :2]).view(np.float16).astype(np.float64)
    if kv_format == "int8":
        return (scale * groups[..., 2:].view(np.int8)).reshape(*lead, -1)
    low = np.ascontiguousarray(groups[..., 2:4]).view(np.float16).astype(np.float64)
    nibbles = np.concatenate([groups[..., 4:] & 15, groups[..., 4:] >> 4], axis=-1)
    return (scale * nibbles + low).reshape(*lead, -1)


@dataclass
class Cache:
    """Poisoned pools (every unused byte is part of a NaN) and who owns which blocks."""

    shape: Shape
    blocks: int = 64
    seed: int = 0
    key_pool: np.ndarray = field(init=False)
    value_pool: np.ndarray = field(init=False)
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.shape
        size = (self.blocks, s.block_size, s.kv_heads)
        self.rng = np.random.default_rng(self.seed)
        self.key_pool = np.full((*size, row_bytes(s.kv_format, s.key_dim)), 255, np.uint8)
        self.value_pool = np.full((*size, row_bytes(s.kv_format, s.value_dim)), 255, np.uint8)
        self.free = list(self.rng.permutation(self.blocks))

    def step(self, new: dict[int, int]) -> dict[str, np.ndarray]:
        """Index inputs of a step that appends `new[b]` tokens to sequence b; owns their blocks."""
        size = self.shape.block_size
        slots: list[int] = []
        for b, count in new.items():
            table = self.tables.setdefault(b, [])
            start = self.lengths.get(b, 0)
            self.lengths[b] = start + count
            while len(table) * size < start + count:
                table.append(int(self.free.pop()))
            slots += [table[p // size] * size + p % size for p in range(start, start + count)]
        width = max((len(self.tables[b]) for b in new), default=0) + 3
        tables = [self.tables[b] + [-7] * (width - len(self.tables[b])) for b in new]
        return {
            "slots": np.array(slots, np.int32),
            "seq_starts": np.cumsum([0, *new.values()]).astype(np.int32),
            "kv_lens": np.array([self.lengths[b] for b in new], np.int32),
            "block_tables": np.array(tables, np.int32).reshape(len(new), width),
        }

    def tokens(self, count: int) -> dict[str, np.ndarray]:
        s = self.shape
        widths = {
            "q": s.heads * s.key_dim,
            "k": s.kv_heads * s.key_dim,
            "v": s.kv_heads * s.value_dim,
        }
        return {
            n: self.rng.standard_normal((count, w)).astype(np.float32) for n, w in widths.items()
        }

    def rows(self, pool: np.ndarray, b: int) -> np.ndarray:
        """Decoded rows [kv_len, kv_heads, dim] of one sequence."""
        flat = pool[self.tables[b]].reshape(-1, *pool.shape[2:])[: self.lengths[b]]
        return decode(flat, self.shape.kv_format)


def reference(cache: Cache, feeds: dict[str, np.ndarray], new: dict[int, int]) -> np.ndarray:
    """Dense attention in float64 over what the pool holds after the step."""
    s = cache.shape
    out, row = [], 0
    for b, count in new.items():
        if count == 0:
            continue
        keys = np.repeat(cache.rows(cache.key_pool, b), s.heads // s.kv_heads, axis=1)
        values = np.repeat(cache.rows(cache.value_pool, b), s.heads // s.kv_heads, axis=1)
        q = feeds["q"][row : row + count].reshape(count, s.heads, s.key_dim).astype(np.float64)
        row += count
        logits = s.scale * np.einsum("thd,jhd->htj", q, keys)
        if s.softcap:
            logits = s.softcap * np.tanh(logits / s.softcap)
        at = np.arange(cache.lengths[b] - count, cache.lengths[b])[:, None]
        j = np.arange(cache.lengths[b])[None, :]
        seen = (j <= at) & ((j > at - s.window) if s.window else True)
        logits = np.where(seen, logits, -np.inf)
        if s.sinks:
            sink = np.broadcast_to(feeds["sinks"][:, None, None], (s.heads, count, 1))
            logits = np.concatenate([logits, sink], axis=-1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        weights = weights[..., : cache.lengths[b]]
        out.append(np.einsum("htj,jhd->thd", weights, values).reshape(count, -1))
    return np.concatenate(out) if out else np.zeros((0, s.heads * s.value_dim))


def session(op_session, shape: Shape, threads: int = 2) -> ort.InferenceSession:
    return op_session(
        "Attention",
        INPUTS | ({"sinks": "f32"} if shape.sinks else {}),
        {"o": "f32", "key_pool_out": "u8", "value_pool_out": "u8"},
        threads=threads,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        scale=shape.scale,
        window=shape.window,
        softcap=shape.softcap,
        kv_format=shape.kv_format,
    )


def run(sess: ort.InferenceSession, cache: Cache, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """One step in place: the pools are bound as inputs and as outputs."""
    binding = sess.io_binding()
    binding.bind_output("o")
    for name, data in feeds.items():
        binding.bind_cpu_input(name, data)
    for name in ("key_pool", "value_pool"):
        value = ort.OrtValue.ortvalue_from_numpy(getattr(cache, name))
        assert value.data_ptr() == getattr(cache, name).ctypes.data
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(f"{name}_out", value)
    sess.run_with_iobinding(binding)
    return binding.get_outputs()[0].numpy()


def play(op_session, shape: Shape, steps: list[dict[int, int]], seed: int = 0) -> None:
    """Runs steps and compares each with the reference."""
    sess = session(op_session, shape)
    cache = Cache(shape, seed=seed)
    sinks = {"sinks": cache.rng.standard_normal(shape.heads).astype(np.float32)}
    for new in steps:
        feeds = cache.tokens(sum(new.values())) | (sinks if shape.sinks else {}) | cache.step(new)
        got = run(sess, cache, feeds)
        want = reference(cache, feeds, new)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


STEPS = [{0: 37, 1: 5}, {0: 1, 1: 1}, {0: 1, 2: 70, 1: 9}, {2: 1, 0: 0, 1: 1}, {2: 65, 0: 64}]

SHAPES = {
    "gqa": Shape(),
    "mha": Shape(heads=3, kv_heads=3),
    "mqa": Shape(heads=40, kv_heads=1, key_dim=32, value_dim=32),
    "f32": Shape(kv_format="f32"),
    "int8": Shape(kv_format="int8", key_dim=96, value_dim=32),
    "int4": Shape(kv_format="int4"),
    "int4-one-row": Shape(kv_format="int4", heads=2),
    "odd-sizes": Shape(key_dim=27, value_dim=50),
    "odd-f32": Shape(key_dim=5, value_dim=3, kv_format="f32"),
    "wide": Shape(heads=4, key_dim=256, value_dim=192),
    "window": Shape(window=20),
    "window-of-one": Shape(window=1, heads=2),
    "softcap": Shape(softcap=3.0, scale=1.0),
    "sinks": Shape(sinks=True, window=33),
    "block-of-one": Shape(block_size=1, heads=2, kv_heads=1),
    "block-of-7": Shape(block_size=7, kv_format="int8"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_matches_dense_attention(op_session, name: str) -> None:
    shape = SHAPES[name]
    if shape.block_size == 1:
        play(op_session, shape, [{0: 37}, {0: 1, 1: 9}])
    else:
        play(op_session, shape, STEPS)
