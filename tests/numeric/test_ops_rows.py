"""RmsNorm and Rope against torch in float64."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
import torch


def rms_session(op_session, eps: float = 1e-5) -> ort.InferenceSession:
    return op_session("RmsNorm", {"x": "f32", "w": "f32"}, {"y": "f32"}, eps=eps)


@pytest.mark.parametrize(
    "shape", [(1, 576), (3, 1), (2, 3, 83), (64,), (5, 16), (0, 32), (300, 2048), (2, 2, 2, 7)]
)
def test_rms_norm(op_session, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    w = rng.standard_normal(shape[-1:]).astype(np.float32)
    (y,) = rms_session(op_session).run(None, {"x": x, "w": w})
    want = torch.nn.functional.rms_norm(
        torch.from_numpy(x).double(), shape[-1:], torch.from_numpy(w).double(), 1e-5
    )
    # A factor and two roundings of fp32 after a sum of squares: 4 units in the last place.
    np.testing.assert_allclose(y, want.numpy(), rtol=4 * 2**-23, atol=0)


def test_rms_norm_of_zeros_and_of_tiny_values(op_session) -> None:
    sess = rms_session(op_session, 1e-6)
    x = np.zeros((2, 40), np.float32)
    x[1] = 1e-20
    (y,) = sess.run(None, {"x": x, "w": np.ones(40, np.float32)})
    assert np.all(y[0] == 0)
    np.testing.assert_allclose(y[1], 1e-17, rtol=1e-6)


def test_rms_norm_of_a_row_does_not_depend_on_the_others(op_session) -> None:
    sess = rms_session(op_session)
    x = np.random.default_rng(1).standard_normal((500, 576)).astype(np.float32)
    w = np.ones(576, np.float32)
    (many,) = sess.run(None, {"x": x, "w": w})
    for r in (0, 17, 499):
        (one,) = sess.run(None, {"x": x[r : r + 1], "w": w})
        assert one.tobytes() == many[r : r + 1].tobytes()


def test_rms_norm_errors(op_session) -> None:
    x = np.ones((2, 40), np.float32)
    with pytest.raises(Exception, match=r"'the_RmsNorm': w has shape \[41\], expected \[40\]"):
        rms_session(op_session).run(None, {"x": x, "w": np.ones(41, np.float32)})
    with pytest.raises(Exception, match="attribute 'eps' is missing"):
        op_session("RmsNorm", {"x": "f32", "w": "f32"}, {"y": "f32"})


def rotated(x: torch.Tensor, style: str) -> torch.Tensor:
    if style == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)
    return torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)


def rope_reference(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, style: str) -> np.ndarray:
    """y = x cos + rotated(x) sin on the first R elements, as in transformers' models."""
    width = cos.shape[-1]
    head = torch.from_numpy(x[..., :width]).double()
    c, s = (torch.from_numpy(a).double().unsqueeze(-2) for a in (cos, sin))
    turned = head * c + rotated(head, style) * s
    return torch.cat([turned, torch.from_numpy(x[..., width:]).double()], dim=-1).numpy()


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("x_shape", "angle_shape"),
    [
        ((1, 9, 64), (1, 64)),
        ((7, 2, 64), (7, 64)),
        ((7, 3, 80), (7, 22)),
        ((4, 2, 6), (4, 2)),
        ((2, 5, 3, 32), (2, 5, 32)),
        ((2, 5, 3, 32), (1, 5, 32)),
        ((2, 5, 3, 32), (5, 32)),
        ((3, 32), (32,)),
        ((0, 2, 32), (0, 32)),
        ((400, 4, 64), (400, 64)),
    ],
)
def test_rope(op_session, style: str, x_shape: tuple[int, ...], angle_shape) -> None:
    rng = np.random.default_rng(2)
    x, cos, sin = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in (x_shape, angle_shape, angle_shape)
    )
    sess = op_session("Rope", {"x": "f32", "cos": "f32", "sin": "f32"}, {"y": "f32"}, style=style)
    (y,) = sess.run(None, {"x": x, "cos": cos, "sin": sin})
    # Two products of values up to about 10 and a sum, each rounded once.
    np.testing.assert_allclose(y, rope_reference(x, cos, sin, style), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("cos", "sin", "message"),
    [
        ((4, 66), (4, 66), "doesn't fit x"),
        ((4, 7), (4, 7), "doesn't fit x"),
        ((3, 32), (3, 32), "doesn't fit x"),
        ((4, 32), (4, 16), r"cos has shape \[4, 32\], sin \[4, 16\]"),
    ],
)
def test_rope_errors(op_session, cos: tuple[int, ...], sin: tuple[int, ...], message: str) -> None:
    sess = op_session("Rope", {"x": "f32", "cos": "f32", "sin": "f32"}, {"y": "f32"}, style="half")
    feeds = {"x": (4, 2, 64), "cos": cos, "sin": sin}
    with pytest.raises(Exception, match=message):
        sess.run(None, {n: np.zeros(shape, np.float32) for n, shape in feeds.items()})


def test_rope_style_is_checked(op_session) -> None:
    with pytest.raises(Exception, match="unknown style 'quarter'"):
        op_session("Rope", {"x": "f32", "cos": "f32", "sin": "f32"}, {"y": "f32"}, style="quarter")
