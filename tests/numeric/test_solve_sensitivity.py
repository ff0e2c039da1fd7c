"""Curvatures against the definition, and the KL they predict against the KL there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from spikeinfer import SpikeError
from spikeinfer.compiler.ir import Graph, parse_graph
from spikeinfer.compiler.solve.candidates import SAMPLED, Curve, curve, divergences, weighted
from spikeinfer.compiler.solve.correction import corrected
from spikeinfer.compiler.solve.segments import segments
from spikeinfer.compiler.solve.sensitivity import Curvature, _direction, measure

V, K = 64, 32
TEXT = f"""
graph toy fused {{
  input %tokens : i64[B, S]
  input %positions : i64[B, S]
  const @embed : f32[{V}, {K}] = parameter "embed"
  const @head : f32[{V}, {K}] = parameter "head"
  const @unread : f32[{V}, {K}] = parameter "unread"
  %x = embedding(@embed, %tokens) : f32[B, S, {K}]
  %y = linear(%x, @head) : f32[B, S, {V}]
  output %y
}}
"""
WINDOWS = [[(7 * i + w) % V for i in range(32)] for w in range(4)]


def toy() -> tuple[Graph, dict[str, torch.Tensor]]:
    bits = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(V, K, generator=bits) for n in ("embed", "head", "unread")}
    weights["head"] *= 0.3
    return parse_graph(TEXT), weights


def measured(draws: int = 2) -> dict[str, Curvature]:
    graph, weights = toy()
    matrices = list(graph.constants.values())
    return measure(graph, weights.__getitem__, matrices, WINDOWS, draws)


def test_directions_have_the_covariance_of_a_softmax() -> None:
    """Of 40,000 directions; an entry's standard error is below 0.5 / sqrt(40,000) = 0.0025."""
    logits = torch.tensor([3.0, 2.0, 0.0, -1.0, 1.5])
    p = torch.softmax(logits.double(), -1)
    found = _direction(logits.expand(40_000, 5), seed=1).double()
    np.testing.assert_allclose(found.sum(-1), 0, atol=1e-6)  # adding to all logits changes nothing
    covariance = found.T @ found / len(found)
    np.testing.assert_allclose(covariance, torch.diag(p) - torch.outer(p, p), atol=0.01)


def test_the_curvature_of_a_softmax_layer() -> None:
    """F of W in softmax(W x): the mean of (p_i - p_i^2) x_j^2, here from 400 directions."""
    _, weights = toy()
    tokens = torch.tensor(WINDOWS).flatten()
    x = weights["embed"][tokens].double()
    p = torch.softmax(x @ weights["head"].double().T, -1)
    exact = torch.einsum("ti,tj->ij", p - p.square(), x.square()) / len(tokens)
    found = measured(draws=100)["head"]
    np.testing.assert_allclose(found.rows, exact.sum(1), rtol=0.15)
    np.testing.assert_allclose(found.columns, exact.sum(0), rtol=0.15)


def test_predicted_kl_is_the_real_one() -> None:
    """Both matrices, one after the other; 8 directions estimate a sum of 2,048 terms to 20%."""
    _, weights = toy()
    tokens = torch.tensor(WINDOWS).flatten()

    def logits(**changed: torch.Tensor) -> torch.Tensor:
        now = {**weights, **changed}
        return torch.log_softmax(now["embed"].double()[tokens] @ now["head"].double().T, -1)

    base = logits()
    for name in ("embed", "head"):
        predicted = divergences(weights[name], measured()[name], ["q8_0", "q5_0"])
        for format, kl in predicted.items():
            rows = weights[name].numpy()
            stored = torch.from_numpy(_dequantized(rows, format))
            real = float((base.exp() * (base - logits(**{name: stored}))).sum(-1).mean())
            assert kl == pytest.approx(real, rel=0.2), (name, format)


def _dequantized(rows: np.ndarray, format: str) -> np.ndarray:
    from spikeinfer.kernels import dequantize

    return dequantize(
        weighted(rows, format, np.ones(rows.shape[1], np.float32)), format, rows.shape[1]
    )  # type: ignore[arg-type]


def test_the_same_figures_again_and_none_for_what_is_not_read() -> None:
    one, two = measured(), measured()
    for name in one:
        np.testing.assert_array_equal(one[name].rows, two[name].rows)
    assert not one["unread"].rows.any()
    assert not one["unread"].columns.any()


def test_segments_give_what_the_whole_gives() -> None:
    """One op each; a tied embedding has one gradient from two segments, the stream skips some."""
    text = f"""
graph deep fused {{
  input %tokens : i64[B, S]
  input %positions : i64[B, S]
  const @embed : f32[{V}, {K}] = parameter "embed"
  const @head : f32[{V}, {K}] = parameter "embed"
  const @up : f32[{V}, {K}] = parameter "up"
  const @down : f32[{K}, {V}] = parameter "up" transposed
  %x = embedding(@embed, %tokens) : f32[B, S, {K}]
  %u = linear(%x, @up) : f32[B, S, {V}]
  %s = silu(%u) : f32[B, S, {V}]
  %d = linear(%s, @down) : f32[B, S, {K}]
  %r = add(%x, %d) : f32[B, S, {K}]
  %y = linear(%r, @head) : f32[B, S, {V}]
  output %y
}}
"""
    bits = torch.Generator().manual_seed(0)
    weights = {n: 0.3 * torch.randn(V, K, generator=bits) for n in ("embed", "up")}
    graph = parse_graph(text)
    matrices = list(graph.constants.values())
    assert len(segments(graph, weight_bytes=1)) == 6
    whole, cut = (
        measure(graph, weights.__getitem__, matrices, WINDOWS, weight_bytes=size)
        for size in (1 << 30, 1)
    )
    for name, curvature in whole.items():
        # Gradients of two uses are added in another order; margins are kept to 20 bits.
        np.testing.assert_allclose(cut[name].rows, curvature.rows, rtol=1e-5)
        np.testing.assert_allclose(cut[name].columns, curvature.columns, rtol=1e-5)


def test_gradients_that_are_not_finite() -> None:
    graph, weights = toy()
    weights["head"][3, 4] = torch.nan
    with pytest.raises(SpikeError, match="SPK423"):
        measure(graph, weights.__getitem__, list(graph.constants.values()), WINDOWS)


def test_a_curve_holds_what_fits() -> None:
    _, weights = toy()
    found = curve("head", weights["head"], measured()["head"], ("q4_k", "q5_0", "q8_0", "f16"))
    assert [o.format for o in found.options] == ["q5_0", "q8_0", "f16"]  # K = 32, q4_k needs 256
    assert [o.bytes for o in found.options] == [V * 22, V * 34, V * K * 2]
    padded = curve("head", weights["head"], measured()["head"], ("q5_0",), page=4096)
    assert padded.options[0].bytes == 4096
    weights["head"][0, 0] = 1e6  # f16 ends at 65504
    found = curve("head", weights["head"], measured()["head"], ("f16", "bf16"))
    assert [o.format for o in found.options] == ["bf16"]


def test_experts_add_up() -> None:
    bits = torch.Generator().manual_seed(1)
    stack = torch.randn(3, V, K, generator=bits)
    curvature = Curvature(np.ones((3, V)) * K, np.ones((3, K)) * V)
    whole = divergences(stack, curvature, ["q5_0"])["q5_0"]
    alone = Curvature(np.ones(V) * K, np.ones(K) * V)
    parts = sum(divergences(part, alone, ["q5_0"])["q5_0"] for part in stack)
    assert whole == pytest.approx(parts, rel=1e-5)  # six digits are kept


def test_an_expert_that_no_token_chose_counts_as_the_others() -> None:
    stack = torch.randn(1, V, K, generator=torch.Generator().manual_seed(1)).expand(3, V, K)
    rows, columns = np.ones((3, V)) * K, np.ones((3, K)) * V
    seen = divergences(stack, Curvature(rows, columns), ["q5_0"])["q5_0"]
    rows[1], columns[1] = 0, 0
    unseen = divergences(stack, Curvature(rows, columns), ["q5_0"])["q5_0"]
    assert unseen == pytest.approx(seen, rel=1e-5)


def test_a_large_matrix_is_sampled() -> None:
    rows = 4 * SAMPLED // 1024
    bits = torch.Generator().manual_seed(2)
    values = torch.randn(rows, 1024, generator=bits)
    curvature = Curvature(np.linspace(1, 2, rows) * 1024, np.ones(1024) * rows * 1.5)
    found = divergences(values, curvature, ["q8_0"])["q8_0"]
    error = values.numpy() - _dequantized(values.numpy(), "q8_0")
    exact = 0.5 * float((np.linspace(1, 2, rows) * np.square(error).sum(1)).sum())
    # A quarter of 8,192 rows of 1,024 independent errors each.
    assert found == pytest.approx(exact, rel=0.01)


def test_coarse_formats_cost_what_they_cost_together() -> None:
    """The head alone, in q4_0, predicted ten times too low: its option gets the real KL."""
    graph, weights = toy()
    matrices = [graph.constants["head"]]
    matrices[0].role = "ffn_up"
    curvatures = {"head": measured()["head"]}
    honest = curve("head", weights["head"], curvatures["head"], ("q4_0", "q8_0"))
    low = Curve("head", tuple(replace(o, kl=o.kl / 10) for o in honest.options))
    (found,) = corrected(graph, weights.__getitem__, matrices, curvatures, [low], WINDOWS)
    by_format = {o.format: o.kl for o in found.options}
    # Another two windows than those of the prediction, and 8 directions: as above, 20%.
    assert by_format["q4_0"] == pytest.approx(honest.options[0].kl, rel=0.3)
    assert by_format["q8_0"] == low.options[-1].kl  # not a coarse format


def test_what_is_predicted_too_high_stays() -> None:
    graph, weights = toy()
    matrices = [graph.constants["head"]]
    curvatures = {"head": measured()["head"]}
    honest = curve("head", weights["head"], curvatures["head"], ("q4_0", "q8_0"))
    high = Curve("head", tuple(replace(o, kl=o.kl * 10) for o in honest.options))
    assert corrected(graph, weights.__getitem__, matrices, curvatures, [high], WINDOWS) == [high]
