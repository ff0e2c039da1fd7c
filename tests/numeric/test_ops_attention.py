"""Attention over a paged cache, against a dense float64 softmax over the decoded pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnxruntime as ort
import pytest
from spikeinfer.kernels import cpu_tier

# fp32 sums of a few hundred terms of size one; exp and tanh approximations of 2 ulp.
TOLERANCE = 2e-5
# Of a weight that is rounded to bf16: half a unit, and the approximation of exp that goes with it.
WEIGHT_ERROR = 2**-8 + 8e-5
GROUP = 32
"""Tokens whose keys share scales in int4."""


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    slopes: bool = False
    kv_format: str = "f16"
    sinks: bool = False
    block_size: int = 16
    scale: float = 0.17

    @property
    def recent_rows(self) -> int:
        """Tokens whose f16 keys fit in a block of int4 keys."""
        return self.block_size * 20 // 64

    @property
    def recent_blocks(self) -> int:
        """Blocks for the 32 tokens of a sequence's last group; only int4 has such."""
        return -(-GROUP // self.recent_rows) if self.kv_format == "int4" else 0


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


def decode_keys(groups: np.ndarray) -> np.ndarray:
    """Keys [..., 32, dim] of int4 groups u8[..., 20 * dim]: halves of scale and min, then rows."""
    dim = groups.shape[-1] // 20
    header = np.ascontiguousarray(groups[..., : 4 * dim]).view(np.float16).astype(np.float64)
    codes = groups[..., 4 * dim :].reshape(*groups.shape[:-1], GROUP, dim // 32, 16)
    nibbles = np.concatenate([codes & 15, codes >> 4], axis=-1)
    nibbles = nibbles.reshape(*groups.shape[:-1], GROUP, dim)
    return header[..., None, :dim] * nibbles + header[..., None, dim:]


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
    exact: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

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
            lead = self.shape.recent_blocks
            while (len(table) - lead) * size < start + count:
                table.append(int(self.free.pop()))
            spots = range(start, start + count)
            slots += [table[lead + p // size] * size + p % size for p in spots]
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
        """Decoded rows [kv_len, kv_heads, dim] of one sequence; int4: of whole groups of keys."""
        s, length = self.shape, self.lengths[b]
        blocks = pool[self.tables[b][s.recent_blocks :]]
        if s.kv_format == "int4" and pool is self.key_pool:
            groups = blocks.reshape(-1, s.kv_heads, 20 * s.key_dim)[: length // GROUP]
            return decode_keys(groups).transpose(0, 2, 1, 3).reshape(-1, s.kv_heads, s.key_dim)
        return decode(blocks.reshape(-1, *pool.shape[2:])[:length], s.kv_format)

    def remember(self, feeds: dict[str, np.ndarray], new: dict[int, int]) -> None:
        """Keep the f16 keys and values of a step: what queries of the same group read."""
        row = 0
        for b, count in new.items():
            kept = self.exact.setdefault(b, {})
            for name, dim in (("k", self.shape.key_dim), ("v", self.shape.value_dim)):
                rows = feeds[name][row : row + count].reshape(count, self.shape.kv_heads, dim)
                rows = rows.astype(np.float16).astype(np.float64)
                kept[name] = np.concatenate([kept[name], rows]) if name in kept else rows
            row += count


def in_bf16(s: Shape) -> bool:
    """Whether queries, keys, values and weights are rounded to bf16 in this run."""
    return cpu_tier() == "avx512_bf16" and s.kv_format != "f32"


def multiplied(s: Shape, x: np.ndarray) -> np.ndarray:
    """What the products of attention read for x: x as bf16, rounded to nearest, or x."""
    if not in_bf16(s):
        return x
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def check(got: np.ndarray, cache: Cache, feeds: dict[str, np.ndarray], new: dict[int, int]) -> None:
    """Holds a step's result against the reference.

    Weights w that are each off by up to e of themselves shift a row by at most e * sum of
    w |v - row|, which is at most e * (sum of w |v| + |row|).
    """
    want = reference(cache, feeds, new)
    assert got.shape == want.shape
    allowed = np.full_like(want, TOLERANCE)
    if in_bf16(cache.shape):
        allowed += WEIGHT_ERROR * (reference(cache, feeds, new, sizes=True) + np.abs(want))
    worst = np.abs(got - want) - allowed
    assert np.all(worst <= 0), worst.max()  # false for a NaN


def reference(
    cache: Cache, feeds: dict[str, np.ndarray], new: dict[int, int], sizes: bool = False
) -> np.ndarray:
    """Dense attention in float64 over what the pool holds after the step; `sizes`: of |values|."""
    s = cache.shape
    out, row = [], 0
    for b, count in new.items():
        if count == 0:
            continue
        q = feeds["q"][row : row + count].reshape(count, s.heads, s.key_dim).astype(np.float64)
        row += count
        at = np.arange(cache.lengths[b] - count, cache.lengths[b])[:, None]
        j = np.arange(cache.lengths[b])[None, :]
        keys, values = (cache.rows(pool, b) for pool in (cache.key_pool, cache.value_pool))
        if s.kv_format == "int4":
            coded = (j // GROUP < at // GROUP)[None]
            young = cache.lengths[b] - len(keys)
            keys = np.concatenate([keys, np.zeros((young, *keys.shape[1:]))])
            recent = cache.exact[b]
            logits = np.where(coded, _logits(s, q, keys), _logits(s, q, recent["k"]))
        else:
            logits = _logits(s, q, keys)
        weights = _weights(s, feeds, logits, at, j)
        if s.kv_format == "int4":
            rows = _mix(s, weights * coded, values, sizes)
            rows += _mix(s, weights * ~coded, recent["v"], sizes)
        else:
            rows = _mix(s, weights, values, sizes)
        out.append(rows.reshape(count, -1))
    return np.concatenate(out) if out else np.zeros((0, s.heads * s.value_dim))


def _logits(s: Shape, q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[heads, tokens, positions]"""
    keys = np.repeat(multiplied(s, keys), s.heads // s.kv_heads, axis=1)
    q = q.astype(np.float32) * np.float32(s.scale)
    return np.einsum("thd,jhd->htj", multiplied(s, q).astype(np.float64), keys)


def _mix(s: Shape, weights: np.ndarray, values: np.ndarray, sizes: bool) -> np.ndarray:
    values = np.repeat(multiplied(s, values), s.heads // s.kv_heads, axis=1)
    return np.einsum("htj,jhd->thd", weights, np.abs(values) if sizes else values)


def _weights(
    s: Shape, feeds: dict[str, np.ndarray], logits: np.ndarray, at: np.ndarray, j: np.ndarray
) -> np.ndarray:
    """Softmax over the positions that each token sees, and the sink."""
    if s.softcap:
        logits = s.softcap * np.tanh(logits / s.softcap)
    if s.slopes:
        logits = logits + feeds["slopes"][:, None, None].astype(np.float64) * (j - at)
    seen = (j <= at) & ((j > at - s.window) if s.window else True)
    seen &= (j // s.chunk == at // s.chunk) if s.chunk else True
    logits = np.where(seen, logits, -np.inf)
    if s.sinks:
        sink = np.broadcast_to(feeds["sinks"][:, None, None], (s.heads, at.size, 1))
        logits = np.concatenate([logits, sink], axis=-1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights[..., : j.size]


def _ports(shape: Shape) -> tuple[str, ...]:
    """Optional inputs up to the last one that is there."""
    return ("sinks", "slopes") if shape.slopes else ("sinks",) if shape.sinks else ()


def session(op_session, shape: Shape, threads: int = 2) -> ort.InferenceSession:
    optional = [name for name in ("sinks", "slopes") if getattr(shape, name)]
    return op_session(
        "Attention",
        INPUTS | dict.fromkeys(optional, "f32"),
        {"o": "f32", "key_pool_out": "u8", "value_pool_out": "u8"},
        threads=threads,
        order=[*INPUTS, *(n if n in optional else "" for n in _ports(shape))],
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        scale=shape.scale,
        window=shape.window,
        chunk=shape.chunk,
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
    per_head = {
        name: cache.rng.standard_normal(shape.heads).astype(np.float32)
        for name in ("sinks", "slopes")
        if getattr(shape, name)
    }
    for new in steps:
        feeds = cache.tokens(sum(new.values())) | per_head | cache.step(new)
        got = run(sess, cache, feeds)
        cache.remember(feeds, new)
        check(got, cache, feeds, new)


STEPS = [{0: 37, 1: 5}, {0: 1, 1: 1}, {0: 1, 2: 70, 1: 9}, {2: 1, 0: 0, 1: 1}, {2: 65, 0: 64}]

SHAPES = {
    "gqa": Shape(),
    "mha": Shape(heads=3, kv_heads=3),
    "mqa": Shape(heads=40, kv_heads=1, key_dim=32, value_dim=32),
    "f32": Shape(kv_format="f32"),
    "int8": Shape(kv_format="int8", key_dim=96, value_dim=32),
    "int4": Shape(kv_format="int4", block_size=32),
    "int4-one-row": Shape(kv_format="int4", heads=2, block_size=32),
    "int4-blocks-of-64": Shape(kv_format="int4", heads=4, block_size=64, key_dim=256, value_dim=32),
    "int4-mqa": Shape(kv_format="int4", heads=40, kv_heads=1, key_dim=32, block_size=128),
    "int4-window": Shape(kv_format="int4", window=20, block_size=32),
    "int4-the-rest": Shape(
        kv_format="int4", window=45, chunk=70, softcap=3.0, slopes=True, sinks=True, block_size=32
    ),
    "odd-sizes": Shape(key_dim=27, value_dim=50),
    "odd-f32": Shape(key_dim=5, value_dim=3, kv_format="f32"),
    "wide": Shape(heads=4, key_dim=256, value_dim=192),
    "window": Shape(window=20),
    "window-of-one": Shape(window=1, heads=2),
    "softcap": Shape(softcap=3.0, scale=1.0),
    "sinks": Shape(sinks=True, window=33),
    "chunk": Shape(chunk=20),
    "chunk-of-one": Shape(chunk=1, heads=2),
    "chunk-and-window": Shape(chunk=33, window=20, softcap=3.0),
    "alibi": Shape(slopes=True),
    "alibi-and-the-rest": Shape(slopes=True, sinks=True, window=33, softcap=3.0, heads=40),
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


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_and_schedules(op_session, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_format = str(rng.choice(["f32", "f16", "int8", "int4"]))
    kv_heads = int(rng.integers(1, 4))
    grouped = kv_format.startswith("int")
    dims = 32 * rng.integers(1, 4, 2) if grouped else rng.integers(1, 100, 2)
    shape = Shape(
        heads=kv_heads * int(rng.integers(1, 9)),
        kv_heads=kv_heads,
        key_dim=int(dims[0]),
        value_dim=int(dims[1]),
        window=int(rng.choice([0, 0, rng.integers(1, 100)])),
        chunk=int(rng.choice([0, 0, rng.integers(1, 100)])),
        softcap=float(rng.choice([0.0, 0.0, 5.0])),
        slopes=bool(rng.integers(2)),
        kv_format=kv_format,
        sinks=bool(rng.integers(2)),
        block_size=int(rng.integers(4, 40))
        if kv_format != "int4"
        else 32 * int(rng.integers(1, 4)),
    )
    steps = []
    for _ in range(5):
        company = rng.permutation(4)[: rng.integers(1, 5)]
        steps.append({int(b): int(rng.choice([0, 1, 1, 2, rng.integers(3, 11)])) for b in company})
    play(op_session, shape, steps, seed)


@pytest.mark.parametrize("kv_format", ["f16", "int4"])
def test_long_context_is_shared_between_threads(op_session, kv_format: str) -> None:
    # 5000 positions: segments of 256 and of 1024, several tasks for one decode step.
    shape = Shape(4, 2, key_dim=32, value_dim=32, kv_format=kv_format, block_size=32)
    sess = session(op_session, shape)
    cache = Cache(shape, blocks=180)
    for new in ({0: 4990}, {0: 1}, {0: 9, 1: 3}):
        feeds = cache.tokens(sum(new.values())) | cache.step(new)
        if new.get(0) == 4990:  # a reference for all rows would need [4, 4990, 4990] logits
            run(sess, cache, feeds)
            cache.remember(feeds, new)
            continue
        got = run(sess, cache, feeds)
        cache.remember(feeds, new)
        check(got, cache, feeds, new)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    "name",
    [
        *("gqa", "odd-sizes", "int8", "int4", "int4-mqa", "int4-the-rest"),
        *("window", "sinks", "mqa", "chunk", "alibi"),
    ],
)
def test_bits_depend_neither_on_chunks_nor_on_company(op_session, name: str) -> None:
    shape = SHAPES[name]
    sess = session(op_session, shape)
    alone = Cache(shape, blocks=80, seed=1)
    prompt = alone.tokens(1100)
    fixed = {n: np.linspace(-1, 1, shape.heads, dtype=np.float32) for n in _ports(shape)}
    fixed = {n: numbers for n, numbers in fixed.items() if getattr(shape, n)}
    whole = run(sess, alone, prompt | fixed | alone.step({0: 1100}))

    busy = Cache(shape, blocks=128, seed=2)  # other block numbers
    at, parts = 0, []
    for count in (1, 130, 1, 877, 90, 1):
        company = {5: 1 + at % 40, 0: count, 6: 3}
        others = busy.tokens(sum(company.values()))
        for n, rows in others.items():
            rows[company[5] : company[5] + count] = prompt[n][at : at + count]
        out = run(sess, busy, others | fixed | busy.step(company))
        parts.append(out[company[5] : company[5] + count])
        at += count
    assert same_bits(np.concatenate(parts), whole)


def test_bits_do_not_depend_on_threads(op_session) -> None:
    shape = Shape(heads=6, kv_heads=2)
    outs = []
    for threads in (1, 2, 3):
        sess = session(op_session, shape, threads)
        cache = Cache(shape, blocks=128)
        new: dict[int, int]
        for new in ({0: 1000, 1: 40}, {0: 1, 1: 1}):
            got = run(sess, cache, cache.tokens(sum(new.values())) | cache.step(new))
            outs.append(got)
    assert same_bits(outs[0], outs[2])
    assert same_bits(outs[0], outs[4])
    assert same_bits(outs[1], outs[3])
    assert same_bits(outs[1], outs[5])


@pytest.mark.parametrize(("kv_format", "error"), [("f16", 2**-11), ("int8", 0.5 / 127)])
def test_stored_rows_are_rounded_to_nearest(op_session, kv_format: str, error: float) -> None:
    # Error relative to the largest element of the group of 32, plus the scale's own f16 rounding.
    shape = Shape(kv_format=kv_format)
    cache = Cache(shape)
    feeds = cache.tokens(50) | cache.step({0: 50})
    run(session(op_session, shape), cache, feeds)
    want = feeds["k"].reshape(50, 2, 2, 32)
    got = cache.rows(cache.key_pool, 0).reshape(want.shape)
    worst = np.abs(got - want).max(-1) / np.abs(want).max(-1)
    assert worst.max() <= error * 1.1
    assert worst.max() > error / 4  # or this test looks at the wrong thing


def test_int4_values_are_rounded_to_nearest(op_session) -> None:
    shape = Shape(kv_format="int4", block_size=32)
    cache = Cache(shape)
    feeds = cache.tokens(50) | cache.step({0: 50})
    feeds["v"][0, :32] = 3.25  # a constant group is exact
    run(session(op_session, shape), cache, feeds)
    want = feeds["v"].reshape(50, 2, 2, 32)
    got = cache.rows(cache.value_pool, 0).reshape(want.shape)
    step = (want.max(-1) - want.min(-1)) / 15
    assert np.array_equal(got[0, 0, 0], want[0, 0, 0])
    # Half a step, plus the f16 rounding of the scale (15 steps) and of the minimum (size 4).
    assert np.all(np.abs(got - want).max(-1) <= 0.5 * step + 15 * step * 2**-11 + 4 * 2**-11)


def encoded_keys(x: np.ndarray) -> np.ndarray:
    """What int4 keeps of keys [32 * n, dim], as the documentation says; float64."""
    x = x.astype(np.float16).astype(np.float32).reshape(-1, GROUP, x.shape[1])
    low = x.min(1, keepdims=True).astype(np.float16).astype(np.float32)
    step = x.max(1, keepdims=True) / np.float32(15) - x.min(1, keepdims=True) / np.float32(15)
    step = step.astype(np.float16).astype(np.float32)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    codes = np.clip(np.rint((x - low) * inverse), 0, 15)
    return (codes.astype(np.float64) * step + low).reshape(-1, x.shape[2])


def test_int4_keys_are_coded_by_channel(op_session) -> None:
    """Channels of very different sizes, a constant one, one of zeros: each has its own scale."""
    shape = Shape(kv_format="int4", block_size=64, kv_heads=1, heads=2)
    cache = Cache(shape)
    feeds = cache.tokens(150) | cache.step({0: 150})
    feeds["k"] *= np.geomspace(1e-3, 1e3, 64, dtype=np.float32)
    feeds["k"][:, 7], feeds["k"][:, 8] = 3.3, 0.0
    run(session(op_session, shape), cache, feeds)
    got = cache.rows(cache.key_pool, 0)
    assert got.shape == (128, 1, 64)
    np.testing.assert_array_equal(got[:, 0], encoded_keys(feeds["k"][:128]))


def test_int4_groups_do_not_depend_on_steps(op_session) -> None:
    shape = Shape(kv_format="int4", block_size=32, heads=2)
    sess = session(op_session, shape)
    pools = []
    for counts in ((130,), (1,) * 130, (31, 1, 1, 64, 33), (33, 97)):
        cache, at = Cache(shape, seed=3), 0
        prompt = cache.tokens(130)
        for count in counts:
            part = {n: rows[at : at + count].copy() for n, rows in prompt.items()}
            run(sess, cache, part | cache.step({0: count}))
            at += count
        assert len(cache.rows(cache.key_pool, 0)) == 128
        pools.append((cache.rows(cache.key_pool, 0), cache.rows(cache.value_pool, 0)))
    for keys, values in pools[1:]:
        assert same_bits(keys, pools[0][0])
        assert same_bits(values, pools[0][1])


def test_int4_clamps_what_a_half_cannot_hold(op_session) -> None:
    shape = Shape(kv_format="int4", block_size=32, heads=2, scale=1e-6)
    sess = session(op_session, shape)
    cache = Cache(shape)
    for count in (40, 1):
        feeds = cache.tokens(count) | cache.step({0: count})
        feeds["k"][:, 5], feeds["v"][:, 9] = 1e6, -1e6
        got = run(sess, cache, feeds)
        assert np.isfinite(got).all()
    assert np.all(cache.rows(cache.key_pool, 0)[:, 0, 5] == 65504)


def test_int4_shows_what_is_broken(op_session) -> None:
    """A NaN or infinity stays visible, exact as well as coded, and only in its own sequence."""
    shape = Shape(kv_format="int4", block_size=32)
    sess = session(op_session, shape)
    for broken in (np.nan, np.inf):
        cache = Cache(shape)
        feeds = cache.tokens(80) | cache.step({0: 40, 1: 40})
        feeds["k"][2, 3] = broken
        got = run(sess, cache, feeds)
        assert np.all(np.isnan(got[2:40].reshape(38, 2, -1)[:, 0]))  # from that token on
        assert np.all(np.isfinite(got[:2]))
        assert np.all(np.isfinite(got[40:]))


def test_unused_slots_stay_untouched_and_negative_slots_are_skipped(op_session) -> None:
    shape = Shape(heads=2)
    cache = Cache(shape)
    feeds = cache.tokens(20) | cache.step({0: 20})
    run(session(op_session, shape), cache, feeds)
    used = np.zeros(64 * 16, bool)
    used[feeds["slots"]] = True
    flat = cache.key_pool.reshape(64 * 16, -1)
    assert np.all(flat[~used] == 255)
    assert not np.any(np.all(flat[used] == 255, axis=1))

    again = cache.tokens(20) | {n: feeds[n] for n in ("seq_starts", "kv_lens", "block_tables")}
    again["slots"] = np.full(20, -1, np.int32)
    before = cache.key_pool.copy()
    run(session(op_session, shape), cache, again)
    assert same_bits(cache.key_pool, before)


def test_int4_touches_only_own_blocks_and_slots(op_session) -> None:
    shape = Shape(kv_format="int4", block_size=32, heads=2)
    cache = Cache(shape)
    run(session(op_session, shape), cache, cache.tokens(44) | cache.step({0: 44}))
    own = cache.tables[0]
    lead, (full, part) = own[: shape.recent_blocks], own[shape.recent_blocks :]
    others = np.setdiff1d(np.arange(cache.blocks), own)
    for pool in (cache.key_pool, cache.value_pool):
        assert np.all(pool[others] == 255)
        kept = pool[lead].reshape(len(lead), -1)[:, : shape.recent_rows * 2 * 2 * 64]
        kept = kept.reshape(-1, 2 * 2 * 64)  # 32 places, and what is left of the last block
        assert np.all(kept[12:] == 255)
        assert not np.any(np.all(kept[:12] == 255, axis=1))
    assert np.all(cache.key_pool[part] == 255)  # this group has no codes yet
    assert np.all(cache.value_pool[part, 12:] == 255)
    assert not np.all(cache.key_pool[full] == 255)


@pytest.mark.parametrize("kv_format", ["f16", "int4"])
def test_blocks_left_of_the_window_may_be_gone(op_session, kv_format: str) -> None:
    shape = Shape(window=20, heads=2, kv_format=kv_format, block_size=32)
    cache = Cache(shape)
    sess = session(op_session, shape)
    first = cache.tokens(100) | cache.step({0: 100})
    run(sess, cache, first)
    cache.remember(first, {0: 100})
    feeds = cache.tokens(1) | cache.step({0: 1})
    cache.remember(feeds, {0: 1})
    expect = reference_after(cache, sess, feeds)
    lead = shape.recent_blocks  # then positions 0..63; the window begins at 81
    feeds["block_tables"][0, lead : lead + 2] = -1
    cache.key_pool[cache.tables[0][lead : lead + 2]] = 255
    np.testing.assert_array_equal(run(sess, cache, feeds), expect)


def reference_after(cache: Cache, sess: ort.InferenceSession, feeds: dict) -> np.ndarray:
    """The op's own result, itself checked against the reference."""
    got = run(sess, cache, feeds)
    check(got, cache, feeds, {0: 1})
    return got


def test_nothing_to_do(op_session) -> None:
    shape = Shape()
    cache = Cache(shape)
    sess = session(op_session, shape)
    assert run(sess, cache, cache.tokens(0) | cache.step({})).shape == (0, 6 * 64)
    assert run(sess, cache, cache.tokens(0) | cache.step({0: 0, 1: 0})).shape == (0, 6 * 64)
    assert np.all(cache.key_pool == 255)


def test_a_nan_in_one_sequence_stays_there(op_session) -> None:
    shape = Shape(kv_format="int8")
    cache = Cache(shape)
    new = {0: 5, 1: 5}
    feeds = cache.tokens(10) | cache.step(new)
    feeds["k"][2, 3] = np.nan
    got = run(session(op_session, shape), cache, feeds)
    assert np.all(np.isnan(got[2:5].reshape(3, 2, -1)[:, 0]))  # kv head 0 from that token on
    assert np.all(np.isfinite(got[5:]))


def test_pools_that_are_not_bound_in_place_are_copied(op_session) -> None:
    shape = Shape()
    cache = Cache(shape)
    sess = session(op_session, shape)
    feeds = cache.tokens(30) | cache.step({0: 30})
    pools = {"key_pool": cache.key_pool, "value_pool": cache.value_pool}
    o, key_pool, value_pool = sess.run(None, feeds | pools)
    assert np.all(cache.key_pool == 255)
    same = run(sess, cache, feeds)
    assert same_bits(o, same)
    assert same_bits(key_pool, cache.key_pool)
    assert same_bits(value_pool, cache.value_pool)


FAULTS = {
    "slots": (
        "slots",
        lambda a: a.__setitem__(3, 64 * 16),
        "token 3: slot 1024, the pool has 1024",
    ),
    "block-large": ("block_tables", lambda a: a.__setitem__((0, 1), 64), "entry 1 is block 64"),
    "block-negative": ("block_tables", lambda a: a.__setitem__((0, 0), -1), "entry 0 is block -1"),
    "len-short": ("kv_lens", lambda a: a.__setitem__(0, 19), "less than its 20 new tokens"),
    "len-long": ("kv_lens", lambda a: a.__setitem__(0, 81), "needs 6 blocks, block_tables has 5"),
    "len-huge": ("kv_lens", lambda a: a.__setitem__(0, 2**31 - 1), "needs 134217728 blocks"),
    "starts-first": ("seq_starts", lambda a: a.__setitem__(0, 1), "seq_starts begins with 1"),
    "starts-last": ("seq_starts", lambda a: a.__setitem__(2, 19), "sequence 1: seq_starts decre"),
    "starts-less": ("seq_starts", lambda a: a.__isub__([0, 1, 1]), "ends with 22, the step has 23"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_indices_are_errors_before_anything_is_written(op_session, name: str) -> None:
    array, break_it, message = FAULTS[name]
    shape = Shape()
    cache = Cache(shape)
    feeds = cache.tokens(23) | cache.step({0: 20, 1: 3})
    break_it(feeds[array])
    with pytest.raises(Exception, match="spike.Attention 'the_Attention'.*" + message):
        run(session(op_session, shape), cache, feeds)
    assert np.all(cache.key_pool == 255)
    assert np.all(cache.value_pool == 255)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_format": "int3"}, "unknown kv_format 'int3'"),
        ({"heads": 5}, "5 heads can't share 2 kv heads"),
        ({"window": -1}, "must not be negative"),
    ],
)
def test_bad_attributes_are_errors(op_session, change: dict[str, object], message: str) -> None:
    attributes = {"heads": 6, "kv_heads": 2, "scale": 1.0, "kv_format": "f16"} | change
    outputs = {"o": "f32", "key_pool_out": "u8", "value_pool_out": "u8"}
    with pytest.raises(Exception, match=message):
        op_session("Attention", INPUTS, outputs, **attributes)


def test_bad_shapes_are_errors(op_session) -> None:
    shape = Shape(kv_format="int8")
    cache = Cache(shape)
    sess = session(op_session, shape)
    good = cache.tokens(4) | cache.step({0: 4})
    with pytest.raises(Exception, match=r"k has shape \[4, 64\], expected \[4, 128\]"):
        run(sess, cache, good | {"k": good["k"][:, :64].copy()})
    with pytest.raises(Exception, match=r"slots has shape \[3\], expected \[4\]"):
        run(sess, cache, good | {"slots": good["slots"][:3]})
    with pytest.raises(Exception, match="must be multiples of 32"):
        run(sess, cache, good | {n: good[n][:, : good[n].shape[1] * 3 // 4].copy() for n in "qkv"})
    other = Cache(Shape(kv_format="int4", block_size=32))
    with pytest.raises(Exception, match=r"key_pool has shape \[64, 32, 2, 40\]"):
        run(sess, other, good)


def test_int4_refuses_other_blocks_and_slots_beside_the_table(op_session) -> None:
    odd = Shape(kv_format="int4", block_size=48)
    cache = Cache(odd)
    with pytest.raises(Exception, match="blocks of 48 slots; int4 needs a multiple of 32"):
        run(session(op_session, odd), cache, cache.tokens(4) | cache.step({0: 4}))
    shape = Shape(kv_format="int4", block_size=32)
    sess, cache = session(op_session, shape), Cache(shape)
    good = cache.tokens(4) | cache.step({0: 4})
    with pytest.raises(Exception, match=r"token 2 has slot \d+, its block table says \d+"):
        run(sess, cache, good | {"slots": good["slots"][[0, 1, 3, 2]]})
    bad = good["block_tables"].copy()
    bad[0, 1] = 64  # one of the blocks for recent tokens
    with pytest.raises(Exception, match="entry 1 is block 64, the pool has 64"):
        run(sess, cache, good | {"block_tables": bad})
    with pytest.raises(Exception, match="needs 5 blocks, block_tables has 4"):
        run(sess, cache, good | {"block_tables": good["block_tables"][:, :4].copy()})
    assert np.all(cache.key_pool == 255)
