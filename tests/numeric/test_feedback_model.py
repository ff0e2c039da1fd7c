"""Second moments become factors, and a walk's visitor quantises matrices to their inputs."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from spikeinfer.compiler.assembly.feedback import ModelQuantizer, key_of
from spikeinfer.compiler.calibrate import Moment
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.ir import Constant, DType, TensorType
from spikeinfer.compiler.quantize import Blocks
from spikeinfer.compiler.quantize.feedback import DAMPING, triangular_factor
from spikeinfer.errors import SpikeError
from spikeinfer.kernels import dequantize, quantize


class Weights:
    """As much of a checkpoint as the quantiser asks for."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def load(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int, k: int, seed: int = 5) -> torch.Tensor:
    """Correlated: a quarter of the dimensions."""
    return drawn(tokens, k // 4, seed=seed) @ drawn(k // 4, k, seed=seed + 1)


def constant(*shape: int) -> Constant:
    return Constant("w", TensorType(DType.F32, shape), parameter="w")


def quantizer(
    tmp_path: Path, weight: torch.Tensor, format: str, **options: object
) -> ModelQuantizer:
    const = constant(*weight.shape)
    source = cast(Checkpoint, Weights(w=weight))
    given = options.pop("given", lambda _: None)
    return ModelQuantizer({key_of(const): format}, source, given, tmp_path, 1, **options)  # type: ignore[arg-type]


def output_error(change: torch.Tensor, x: torch.Tensor) -> float:
    return float((x.double() @ change.double().mT).square().sum())


# --- factors -------------------------------------------------------------------------------------


def test_a_factor_gives_its_moment_back() -> None:
    x = inputs(600, 128)
    moment = x.mT @ x
    factor = triangular_factor(moment)
    assert factor is not None
    assert not np.tril(factor, -1).any()
    scaled = moment.double() / float(moment.diagonal().double().mean())
    expected = scaled.numpy() + DAMPING * np.eye(128)
    got = factor.astype(np.float64) @ factor.T.astype(np.float64)
    np.testing.assert_allclose(got, expected, atol=2e-6 * float(scaled.diagonal().max()))


def test_a_factor_is_the_same_for_any_unit_and_number_of_threads() -> None:
    x = inputs(300, 320)
    moment = x.mT @ x
    first = triangular_factor(moment)
    assert first is not None
    before = torch.get_num_threads()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        again = triangular_factor(moment * 1024)  # a power of two: no other rounding
        assert again is not None
        assert again.tobytes() == first.tobytes()
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)


def test_singular_moments_have_factors_and_zero_has_none() -> None:
    few = drawn(2, 96)
    few[:, 10:20] = 0
    factor = triangular_factor(few.mT @ few)
    assert factor is not None
    assert np.isfinite(factor).all()
    assert (np.diagonal(factor) > 0).all()
    assert triangular_factor(torch.zeros(32, 32)) is None


# --- visits --------------------------------------------------------------------------------------


def test_a_visited_matrix_is_stored_and_its_outputs_change_less(tmp_path: Path) -> None:
    weight, x = drawn(40, 256) * 0.05, inputs(500, 256)
    visitor = quantizer(tmp_path, weight, "q4_k")
    const = constant(40, 256)
    assert visitor.wants_products(const)
    new = visitor(const, Moment(x.mT @ x, len(x)))
    blocks = visitor.blocks(const)
    assert new is not None
    assert blocks is not None
    assert blocks.format == "q4_k"
    np.testing.assert_array_equal(new.numpy(), dequantize(np.asarray(blocks.rows), "q4_k", 256))
    plain = torch.from_numpy(dequantize(quantize(weight.numpy(), "q4_k"), "q4_k", 256))
    # Fresh inputs of the same kind, that the quantiser never saw.
    fresh = drawn(300, 64, seed=99) @ drawn(64, 256, seed=6)
    assert output_error(weight - new, fresh) < 0.4 * output_error(weight - plain, fresh)
    assert visitor.outcomes["w"].relative < 0.4
    assert visitor.outcomes["w"].rows.sum() == 40


def test_experts_have_their_own_inputs_and_one_without_tokens_the_others(tmp_path: Path) -> None:
    weight = drawn(3, 16, 256) * 0.05
    seen = [inputs(400, 256, seed=s) for s in (1, 30)]
    moment = torch.stack([seen[0].mT @ seen[0], seen[1].mT @ seen[1], torch.zeros(256, 256)])
    visitor = quantizer(tmp_path, weight, "q5_0")
    new = visitor(constant(3, 16, 256), Moment(moment, torch.tensor([400, 400, 0])))
    assert new is not None
    assert new.shape == weight.shape
    plain = torch.from_numpy(
        dequantize(quantize(weight.reshape(48, 256).numpy(), "q5_0"), "q5_0", 256)
    )
    for expert, x in ((0, seen[0]), (1, seen[1]), (2, torch.cat(seen))):
        change = weight[expert] - plain.reshape(3, 16, 256)[expert]
        assert output_error(weight[expert] - new[expert], x) < 0.6 * output_error(change, x)
    blocks = visitor.blocks(constant(3, 16, 256))
    assert blocks is not None
    assert blocks.rows.shape == (3, 16, 176)


def test_where_products_are_too_large_importances_decide(tmp_path: Path) -> None:
    weight, x = drawn(8, 256), inputs(100, 256)
    x[:, 0] *= 30
    squares = x.double().square().sum(0)
    visitor = quantizer(tmp_path, weight, "q4_k")
    assert not visitor.wants_products(constant(1, 1 << 14))
    assert visitor(constant(8, 256), Moment(squares, 100)) is not None
    blocks = visitor.blocks(constant(8, 256))
    assert blocks is not None
    expected = quantize(weight.numpy(), "q4_k", importance=(squares / 100).float().numpy())
    assert np.asarray(blocks.rows).tobytes() == expected.tobytes()


def test_inputs_that_are_always_zero_leave_the_plain_quantiser(tmp_path: Path) -> None:
    weight = drawn(8, 64)
    visitor = quantizer(tmp_path, weight, "q8_0")
    assert visitor(constant(8, 64), Moment(torch.zeros(64, 64), 10)) is not None
    blocks = visitor.blocks(constant(8, 64))
    assert blocks is not None
    assert np.asarray(blocks.rows).tobytes() == quantize(weight.numpy(), "q8_0").tobytes()


def test_blocks_that_exist_are_kept(tmp_path: Path) -> None:
    weight = drawn(8, 64)
    own = Blocks("q8_0", quantize(2 * weight.numpy(), "q8_0"), 64)
    visitor = quantizer(tmp_path, weight, "q8_0", given=lambda _: own)
    new = visitor(constant(8, 64), Moment(torch.eye(64), 10))
    assert new is not None
    assert torch.allclose(new, 2 * weight, atol=0.05)  # q8_0: half a step of 4 sigma / 127
    assert visitor.blocks(constant(8, 64)) is own


def test_matrices_that_are_not_in_blocks_stay(tmp_path: Path) -> None:
    weight = drawn(8, 64)
    visitor = ModelQuantizer({}, cast(Checkpoint, Weights(w=weight)), lambda _: None, tmp_path, 1)
    assert visitor(constant(8, 64), Moment(torch.eye(64), 10)) is None
    assert visitor.blocks(constant(8, 64)) is None


def test_values_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    weight = drawn(8, 64)
    weight[3, 7] = float("nan")
    visitor = quantizer(tmp_path, weight, "q8_0")
    with pytest.raises(SpikeError, match=r"w\[3, 7\] is nan") as caught:
        visitor(constant(8, 64), Moment(torch.eye(64), 10))
    assert caught.value.code == "SPK403"
