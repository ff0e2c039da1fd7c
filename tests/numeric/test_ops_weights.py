"""Linear, Qkv, Embedding and GatedMlp over weights mapped from a file, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from spikeinfer import kernels

# Block formats multiply int8 activations (one scale per 32): up to half a step of 1/127 of the
# largest activation per product, over sqrt(K) of them. Plain formats keep activations in fp32.
BLOCK_ERROR = 0.02
PLAIN_ERROR = 3e-6


def stored(fmt: str, n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A packed random matrix and the fp32 values it holds."""
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    blocks = kernels.quantize(w, fmt)
    return kernels.pack(blocks, fmt, n, k), kernels.dequantize(blocks, fmt, k)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def tolerance(fmt: str) -> float:
    return PLAIN_ERROR if fmt in ("f32", "f16", "bf16") else BLOCK_ERROR


def linear_session(op_session, fmt: str, packed: np.ndarray, n: int, k: int, names: str):
    """names: which of the optional inputs b(ias) and r(esidual) are there."""
    inputs = {"x": "f32"} | ({"bias": "f32"} if "b" in names else {})
    inputs |= {"residual": "f32"} if "r" in names else {}
    order = ["x", "w", "bias" if "b" in names else "", "residual" if "r" in names else ""]
    while order[-1] == "":
        order.pop()
    return op_session(
        "Linear", inputs, {"y": "f32"}, weights={"w": packed}, order=order, format=fmt, n=n, k=k
    )


@pytest.mark.parametrize("fmt", kernels.FORMATS)
@pytest.mark.parametrize("names", ["", "b", "r", "br"])
def test_linear(op_session, fmt: str, names: str) -> None:
    n, k = 41, 512
    packed, w = stored(fmt, n, k, 0)
    sess = linear_session(op_session, fmt, packed, n, k, names)
    rng = np.random.default_rng(1)
    for lead in ((1,), (7,), (2, 3), (), (0,), (40,)):
        feeds = {
            "x": rng.standard_normal((*lead, k)),
            "bias": 20 * rng.standard_normal(n),
            "residual": 20 * rng.standard_normal((*lead, n)),
        }
        feeds = {
            name: a.astype(np.float32)
            for name, a in feeds.items()
            if name == "x" or name[0] in names
        }
        (y,) = sess.run(None, feeds)
        want = feeds["x"].astype(np.float64) @ w.T.astype(np.float64)
        rest = sum(feeds[name].astype(np.float64) for name in ("bias", "residual") if name in feeds)
        assert y.shape == (*lead, n)
        if want.size:
            assert relative_error(y - rest, want) <= tolerance(fmt)


def test_linear_errors(op_session) -> None:
    packed, _ = stored("f16", 41, 512, 0)
    sess = linear_session(op_session, "f16", packed, 41, 512, "br")
    good = {"x": (3, 512), "bias": (41,), "residual": (3, 41)}
    for name, shape, message in [
        ("x", (3, 511), r"x has shape \[3, 511\], its last dim should be 512"),
        ("bias", (40,), r"bias has shape \[40\], expected \[41\]"),
        ("residual", (2, 41), r"residual has shape \[2, 41\], expected \[3, 41\]"),
    ]:
        shapes = good | {name: shape}
        with pytest.raises(Exception, match=message):
            sess.run(None, {n: np.zeros(s, np.float32) for n, s in shapes.items()})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"format": "iq3_s"}, "unknown format 'iq3_s'"),
        ({"n": 57}, "has 49152 bytes, a packed f16 matrix"),
        ({"n": -1}, "a f16 matrix can't be"),
        ({"format": "q4_k", "k": 500}, "a q4_k matrix can't be"),
        ({"k": None}, "attribute 'k' is missing"),
    ],
)
def test_weight_errors(op_session, attributes: dict[str, object], message: str) -> None:
    packed, _ = stored("f16", 41, 512, 0)
    assert packed.nbytes == 49152
    given = {"format": "f16", "n": 41, "k": 512} | attributes
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(Exception, match=f"'the_Linear': .*{message}"):
        op_session("Linear", {"x": "f32"}, {"y": "f32"}, weights={"w": packed}, **given)


def test_weights_must_be_constant(op_session) -> None:
    inputs = {"x": "f32", "w": "u8"}
    with pytest.raises(Exception, match="weight at input 1: must be a constant initialiser"):
        op_session("Linear", inputs, {"y": "f32"}, format="f16", n=41, k=512)


@pytest.mark.parametrize("fmt", kernels.FORMATS)
@pytest.mark.parametrize("kind", ["i32", "i64"])
def test_embedding_is_exact(op_session, fmt: str, kind: str) -> None:
    n, k = 37, 256
    packed, w = stored(fmt, n, k, 3)
    sess = op_session(
        "Embedding", {"ids": kind}, {"y": "f32"}, weights={"w": packed}, format=fmt, n=n, k=k
    )
    rng = np.random.default_rng(4)
    for shape in ((5,), (2, 3), (0,), (), (400,)):
        ids = rng.integers(0, n, shape).astype(np.int32 if kind == "i32" else np.int64)
        (y,) = sess.run(None, {"ids": ids})
        np.testing.assert_array_equal(y, w[ids])
    for bad in (n, -1):
        with pytest.raises(Exception, match=f"'the_Embedding': id {bad} is outside the table"):
            sess.run(None, {"ids": np.array([0, bad], ids.dtype)})


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}


def mlp_session(op_session, formats: list[str], packed: list[np.ndarray], residual: bool, **extra):
    weights = dict(zip(("gate", "up", "down"), packed, strict=True))
    inputs = {"x": "f32"} | ({"residual": "f32"} if residual else {})
    order = ["x", *weights, *(["residual"] if residual else [])]
    kinds = {f"{name}_format": f for name, f in zip(weights, formats, strict=True)}
    return op_session(
        "GatedMlp", inputs, {"y": "f32"}, weights=weights, order=order, **kinds, **extra
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "formats", [["f32"] * 3, ["q4_k", "q4_k", "q6_k"], ["q8_0", "f16", "q5_0"]]
)
@pytest.mark.parametrize("residual", [False, True])
def test_gated_mlp(op_session, activation: str, formats: list[str], residual: bool) -> None:
    k, m, n = 256, 512, 40
    shapes = [(m, k), (m, k), (n, m)]
    pairs = [stored(f, *s, seed=i) for i, (f, s) in enumerate(zip(formats, shapes, strict=True))]
    sess = mlp_session(
        op_session, formats, [p for p, _ in pairs], residual, activation=activation, k=k, m=m, n=n
    )
    gate, up, down = (torch.from_numpy(w).double() for _, w in pairs)
    rng = np.random.default_rng(5)
    for lead in ((1,), (9,), (2, 2), (0,)):
        x = rng.standard_normal((*lead, k)).astype(np.float32)
        feeds = {"x": x}
        if residual:
            feeds["residual"] = 100 * rng.standard_normal((*lead, n)).astype(np.float32)
        (y,) = sess.run(None, feeds)
        inner = torch.from_numpy(x).double()
        want = (ACTIVATIONS[activation](inner @ gate.T) * (inner @ up.T)) @ down.T
        rest = feeds["residual"].astype(np.float64) if residual else 0.0
        assert y.shape == (*lead, n)
        if y.size:
            # Three products one after the other, each with its own error.
            assert relative_error(y - rest, want.numpy()) <= 3 * max(map(tolerance, formats))


def test_gated_mlp_activation_is_checked(op_session) -> None:
    packed = [stored("f16", *s, seed=0)[0] for s in ((32, 16), (32, 16), (8, 32))]
    with pytest.raises(Exception, match="unknown activation 'tanh'"):
        mlp_session(op_session, ["f16"] * 3, packed, False, activation="tanh", k=16, m=32, n=8)


@pytest.mark.parametrize("formats", [["f32"] * 3, ["q4_k", "q4_k", "q6_k"]])
@pytest.mark.parametrize("given", ["gud", "d", "ud"])
def test_gated_mlp_with_biases(op_session, formats: list[str], given: str) -> None:
    """given: the first letters of the projections with a bias; one missing in between is empty."""
    k, m, n = 256, 522, 41  # no multiple of 16: the last row groups are not full
    m = 512 if "q6_k" in formats else m
    widths = {"gate": m, "up": m, "down": n}
    shapes = [(m, k), (m, k), (n, m)]
    pairs = [stored(f, *s, seed=i) for i, (f, s) in enumerate(zip(formats, shapes, strict=True))]
    weights = dict(zip(widths, [p for p, _ in pairs], strict=True))
    names = {name: f"{name}_bias" for name in widths if name[0] in given}
    sess = op_session(
        "GatedMlp",
        {"x": "f32"} | dict.fromkeys(names.values(), "f32"),
        {"y": "f32"},
        weights=weights,
        order=["x", *weights, "", *(names.get(name, "") for name in widths)],
        activation="silu",
        **{f"{name}_format": f for name, f in zip(weights, formats, strict=True)},
        k=k,
        m=m,
        n=n,
    )
    gate, up, down = (torch.from_numpy(w).double() for _, w in pairs)
    rng = np.random.default_rng(6)
    for tokens in (1, 70):
        x = rng.standard_normal((tokens, k)).astype(np.float32)
        bias = {name: 5 * rng.standard_normal(width) for name, width in widths.items()}
        feeds = {port: bias[name].astype(np.float32) for name, port in names.items()}
        (y,) = sess.run(None, {"x": x} | feeds)
        b = {name: torch.from_numpy(bias[name]) if name in names else 0.0 for name in widths}
        inner = torch.from_numpy(x).double()
        hidden = ACTIVATIONS["silu"](inner @ gate.T + b["gate"]) * (inner @ up.T + b["up"])
        want = hidden @ down.T + b["down"]
        assert relative_error(y, want.numpy()) <= 3 * max(map(tolerance, formats))


@pytest.mark.parametrize("formats", [["f32"] * 3, ["q4_k", "f16", "q6_k"], ["f32", "bf16", "q8_0"]])
@pytest.mark.parametrize("given", ["", "qkv", "k"])
def test_qkv_has_the_bits_of_three_linears(op_session, formats: list[str], given: str) -> None:
    k, rows = 256, {"q": 72, "k": 41, "v": 16}
    kinds = dict(zip(rows, formats, strict=True))
    pairs = {name: stored(kinds[name], n, k, seed=n)[0] for name, n in rows.items()}
    rng = np.random.default_rng(7)
    leads = ((1,), (9,), (2, 70), (0,), ())
    inputs = [rng.standard_normal((*lead, k)).astype(np.float32) for lead in leads]
    bias = {name: rng.standard_normal(n).astype(np.float32) for name, n in rows.items()}
    want: dict[str, list[np.ndarray]] = {}
    for name, n in rows.items():  # one session after the other: they share a file of weights
        optional = {"bias": bias[name]} if name in given else {}
        one = linear_session(op_session, kinds[name], pairs[name], n, k, "b" if optional else "")
        want[name] = [one.run(None, {"x": x} | optional)[0] for x in inputs]
        del one
    biases = {name: f"b{name}" for name in rows if name in given}
    ports = [biases.get(name, "") for name in rows] if given else []
    sess = op_session(
        "Qkv",
        {"x": "f32"} | dict.fromkeys(biases.values(), "f32"),
        dict.fromkeys(rows, "f32"),
        weights={f"w{name}": packed for name, packed in pairs.items()},
        order=["x", *(f"w{name}" for name in rows), *ports],
        **{f"{name}_format": kind for name, kind in kinds.items()},
        **{f"{name}_n": n for name, n in rows.items()},
        k=k,
    )
    for index, x in enumerate(inputs):
        got = sess.run(None, {"x": x} | {port: bias[name] for name, port in biases.items()})
        for name, y in zip(rows, got, strict=True):
            np.testing.assert_array_equal(y, want[name][index])
