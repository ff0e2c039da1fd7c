"""What ops compute on the way has the bits of ops that stand alone: norms, rotations, choices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime as ort
import pytest
from spikeinfer import kernels

Arrays = dict[str, np.ndarray]


def packed(fmt: str, n: int, k: int, seed: int) -> np.ndarray:
    weight = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    return kernels.pack(kernels.quantize(weight, fmt), fmt, n, k)


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run_op(
    op_session,
    op: str,
    feeds: Arrays,
    order: list[str],
    weights: Mapping[str, np.ndarray] | None = None,
    outputs: Mapping[str, str] | None = None,
    **attributes: object,
) -> list[np.ndarray]:
    """One op, its inputs in `order` (empty: left out)."""
    kinds = {"float32": "f32", "int32": "i32", "uint8": "u8"}
    inputs = {name: kinds[str(array.dtype)] for name, array in feeds.items()}
    given = outputs or {"y": "f32"}
    session = op_session(op, inputs, given, weights=weights, order=order, **attributes)
    return session.run(None, feeds)


def normed(op_session, x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    return run_op(op_session, "RmsNorm", {"x": x, "w": w}, ["x", "w"], eps=eps)[0]


@pytest.mark.parametrize("fmt", ["f32", "q4_k"])
@pytest.mark.parametrize("tokens", [0, 1, 9, 130])
def test_a_norm_in_front_of_linear(op_session, fmt: str, tokens: int) -> None:
    n, k = 41, 512
    w, x, norm = packed(fmt, n, k, 0), floats(1, tokens, k), floats(2, k)
    residual = floats(3, tokens, n)
    shared = {"weights": {"w": w}, "format": fmt, "n": n, "k": k}
    feeds = {"x": x, "residual": residual, "norm": norm}
    order = ["x", "w", "", "residual", "norm"]
    (got,) = run_op(op_session, "Linear", feeds, order, norm_eps=1e-5, **shared)
    feeds = {"x": normed(op_session, x, norm, 1e-5), "residual": residual}
    (want,) = run_op(op_session, "Linear", feeds, order[:4], **shared)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("tokens", [1, 70])
def test_a_norm_in_front_of_a_gated_mlp(op_session, tokens: int) -> None:
    k, m, n = 256, 96, 40
    shapes = {"gate": (m, k), "up": (m, k), "down": (n, m)}
    weights = {name: packed("q8_0", *s, seed=i) for i, (name, s) in enumerate(shapes.items())}
    shared = {f"{name}_format": "q8_0" for name in weights}
    shared |= {"weights": weights, "activation": "silu", "k": k, "m": m, "n": n}
    x, norm = floats(4, tokens, k), floats(5, k)
    order = ["x", *weights, "", "", "", "", "norm"]
    (got,) = run_op(op_session, "GatedMlp", {"x": x, "norm": norm}, order, norm_eps=1e-6, **shared)
    feeds = {"x": normed(op_session, x, norm, 1e-6)}
    (want,) = run_op(op_session, "GatedMlp", feeds, order[:4], **shared)
    np.testing.assert_array_equal(got, want)


QKV = {"q_n": 96, "k_n": 64, "v_n": 48, "k": 64}


def qkv(op_session, feeds: Arrays, order: list[str], **attributes: object) -> list[np.ndarray]:
    """Three heads of queries, two of keys, 32 wide."""
    weights = {
        f"w{name}": packed("q8_0", QKV[f"{name}_n"], 64, seed=i) for i, name in enumerate("qkv")
    }
    formats = {f"{name}_format": "q8_0" for name in "qkv"}
    return run_op(
        op_session,
        "Qkv",
        feeds,
        ["x", *weights, *order],
        weights=weights,
        outputs=dict.fromkeys(("q", "k", "v"), "f32"),
        **QKV,
        **formats,
        **attributes,
    )


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_qkv_normalises_and_rotates(op_session, style: str, width: int, tokens: int) -> None:
    x, norm = floats(6, tokens, 64), floats(7, 64)
    head_norms = {"q_norm": floats(8, 32), "k_norm": floats(9, 32)}
    angles = {"cos": floats(10, tokens, width), "sin": floats(11, tokens, width)}
    eps = {"norm_eps": 1e-5, "q_norm_eps": 1e-6, "k_norm_eps": 1e-4}
    feeds = {"x": x, "norm": norm} | head_norms | angles
    order = ["", "", "", "norm", "q_norm", "k_norm", "cos", "sin"]
    got = qkv(op_session, feeds, order, q_heads=3, k_heads=2, style=style, **eps)
    plain = qkv(op_session, {"x": normed(op_session, x, norm, 1e-5)}, [])
    for name, heads, one, all_ in zip("qk", (3, 2), got, plain, strict=False):
        apart = all_.reshape(tokens, heads, 32)
        apart = normed(op_session, apart, head_norms[f"{name}_norm"], eps[f"{name}_norm_eps"])
        feeds = {"x": apart} | angles
        (want,) = run_op(op_session, "Rope", feeds, ["x", "cos", "sin"], style=style)
        np.testing.assert_array_equal(one, want.reshape(one.shape))
    np.testing.assert_array_equal(got[2], plain[2])


def test_a_norm_over_all_heads_at_once(op_session) -> None:
    x, norm = floats(6, 5, 64), floats(8, 96)
    got = qkv(op_session, {"x": x, "q_norm": norm}, ["", "", "", "", "q_norm"], q_norm_eps=1e-6)
    plain = qkv(op_session, {"x": x}, [])
    np.testing.assert_array_equal(got[0], normed(op_session, plain[0], norm, 1e-6))


@pytest.mark.parametrize(
    ("shapes", "attributes", "message"),
    [
        ({"norm": (63,)}, {}, r"norm has shape \[63\], expected \[64\]"),
        ({"q_norm": (33,)}, {}, r"a norm of \[33\] doesn't fit 96 rows"),
        ({"cos": (2, 32), "sin": (2, 30)}, {}, r"cos has shape \[2, 32\], sin \[2, 30\]"),
        ({"cos": (3, 32), "sin": (3, 32)}, {}, "doesn't fit 2 tokens and heads of 32"),
        ({"cos": (2, 34), "sin": (2, 34)}, {}, "doesn't fit 2 tokens and heads of 32"),
        ({}, {"q_heads": 7}, "96 rows can't be 7 heads"),
        ({}, {"style": "spiral"}, "unknown style 'spiral'"),
    ],
)
def test_what_qkv_refuses(op_session, shapes, attributes, message: str) -> None:
    order = ["", "", "", "norm", "q_norm", "k_norm", "cos", "sin"]
    order = [name if name in shapes else "" for name in order]
    feeds = {"x": floats(0, 2, 64)} | {name: floats(1, *s) for name, s in shapes.items()}
    with pytest.raises(Exception, match=f"'the_Qkv': .*{message}"):
        qkv(op_session, feeds, order, **({"q_heads": 3, "k_heads": 2} | attributes))


CHOICE = {"ids": "i32", "best": "f32", "logits": "f32"}


def rows_of(*rows: int) -> np.ndarray:
    return np.array(rows, np.int32)


def best_of(logits: np.ndarray) -> np.ndarray:
    """numpy's rule: the first NaN, or the lowest id of the largest."""
    return logits.argmax(-1)


@pytest.mark.parametrize("fmt", ["f32", "q4_k", "q6_k"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 130])
def test_head_chooses_from_the_logits_of_linear(op_session, fmt: str, tokens: int) -> None:
    n, k = 1003, 256
    w, x, bias, norm = packed(fmt, n, k, 0), floats(1, tokens, k), floats(2, n), floats(3, k)
    shared = {"weights": {"w": w}, "format": fmt, "n": n, "k": k, "norm_eps": 1e-5}
    feeds = {"x": x, "bias": bias, "norm": norm}
    order = ["x", "w", "bias", "", "norm"]
    (logits,) = run_op(op_session, "Linear", feeds, order, **shared)
    for rows in (range(0, tokens, 2), range(0), range(tokens)):
        wanted = feeds | {"wanted": rows_of(*rows)}
        order = ["x", "w", "wanted", "bias", "norm"]
        ids, best, got = run_op(op_session, "Head", wanted, order, outputs=CHOICE, **shared)
        np.testing.assert_array_equal(ids, best_of(logits))
        np.testing.assert_array_equal(best, logits[np.arange(tokens), ids])
        np.testing.assert_array_equal(got, logits[list(rows)])


def test_equal_rows_of_a_head_give_the_first(op_session) -> None:
    weight = np.repeat(floats(0, 4, 32), 300, 0)[:1003]  # ids 0-299 alike, 300-599, ...
    w = kernels.pack(kernels.quantize(weight, "f32"), "f32", 1003, 32)
    feeds = {"x": floats(1, 40, 32), "wanted": rows_of()}
    ids, _, _ = run_op(
        op_session,
        "Head",
        feeds,
        ["x", "w", "wanted"],
        weights={"w": w},
        outputs=CHOICE,
        format="f32",
        n=1003,
        k=32,
    )
    assert set(ids) == {0, 300, 600, 900}


def choice(op_session, x: np.ndarray, threads: int = 2) -> tuple[np.ndarray, np.ndarray]:
    session: ort.InferenceSession = op_session(
        "Choose", {"x": "f32", "wanted": "i32"}, CHOICE, threads=threads
    )
    ids, best, logits = session.run(None, {"x": x, "wanted": rows_of(*range(1, len(x), 2))})
    np.testing.assert_array_equal(logits, x[1::2])
    return ids, best


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (0, 7), (3, 17), (2, 200_003), (70, 1000)])
def test_choose(op_session, shape: tuple[int, int], threads: int) -> None:
    x = floats(3, *shape)
    x = np.round(x * 2) / 2  # many ties
    ids, best = choice(op_session, x, threads)
    np.testing.assert_array_equal(ids, best_of(x))
    np.testing.assert_array_equal(best, x.max(-1))


def test_a_nan_is_the_best_of_its_row_alone(op_session) -> None:
    x = floats(4, 6, 100_000)
    x[0, 77_777] = np.nan
    x[1, [5, 99_999]] = np.nan
    x[2, [50_000, 20]] = np.inf, np.nan
    x[3, 3] = np.inf
    x[4] = -np.inf
    ids, best = choice(op_session, x)
    np.testing.assert_array_equal(ids, [77_777, 5, 20, 3, 0, best_of(x[5])])
    np.testing.assert_array_equal(best, x[np.arange(6), ids])


@pytest.mark.parametrize("rows", [(2,), (-1,), (1, 1), (1, 0)])
def test_wanted_rows_must_rise(op_session, rows: tuple[int, ...]) -> None:
    session = op_session("Choose", {"x": "f32", "wanted": "i32"}, CHOICE)
    with pytest.raises(Exception, match=r"'the_Choose': wanted row -?[0-9]+ behind"):
        session.run(None, {"x": floats(0, 2, 9), "wanted": rows_of(*rows)})
