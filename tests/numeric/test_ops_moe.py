"""Route and MoE as nodes of a session, and both references against transformers' modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from spikeinfer import kernels
from spikeinfer.compiler.ir import OPS
from spikeinfer.kernels import PackedExperts
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

# fp32 rounding: exp, a sum of a few values, a division.
ROUTE_ERROR = 2e-6
# fp32 rounding of two products over 32 to 64 elements in another order.
MODULE_ERROR = 1e-5

ROUTES: dict[str, dict[str, Any]] = {
    "softmax": {"k": 2},
    "softmax, renormalised": {"k": 3, "normalise": True},
    "softmax of the chosen": {"k": 4, "scores": "none", "softmax_chosen": True},
    "one": {"k": 1},
    "all": {"k": 8, "scores": "sigmoid", "scale": 2.5},
    "with a floor": {"k": 2, "normalise": True, "floor": 0.75},
    "best groups by their largest": {"k": 3, "groups": 4, "best_groups": 2},
    "deepseek": {
        "k": 3,
        "scores": "sigmoid",
        "groups": 2,
        "best_groups": 1,
        "per_group": 2,
        "normalise": True,
        "eps": 1e-20,
        "scale": 2.5,
    },
}


def reference(op: str, *tensors: Any, **attrs: Any) -> Any:
    given = {name: spec.default for name, spec in OPS[op].attrs.items()} | attrs
    with torch.no_grad():
        return OPS[op].reference(*tensors, **given)


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("lead", [(1,), (2, 5), (0,), (4000,)])
def test_route(op_session: Any, name: str, corrected: bool, lead: tuple[int, ...]) -> None:
    attrs = ROUTES[name]
    rng = np.random.default_rng(0)
    feeds = {"logits": rng.standard_normal((*lead, 8), np.float32)}
    if corrected:
        feeds["correction"] = rng.standard_normal(8).astype(np.float32)
    session = op_session(
        "Route",
        dict.fromkeys(feeds, "f32"),
        {"weights": "f32", "ids": "i64"},
        experts=8,
        **({"scores": "softmax"} | {k: int(v) if v is True else v for k, v in attrs.items()}),
    )
    weights, ids = session.run(None, feeds)
    wanted, chosen = reference("route", *map(torch.from_numpy, feeds.values()), **attrs)
    np.testing.assert_array_equal(ids, chosen.numpy())
    np.testing.assert_allclose(weights, wanted.numpy(), rtol=ROUTE_ERROR, atol=ROUTE_ERROR)


def test_equal_scores_choose_the_lower_id(op_session: Any) -> None:
    session = op_session(
        "Route",
        {"logits": "f32"},
        {"weights": "f32", "ids": "i64"},
        experts=6,
        k=4,
        scores="softmax",
    )
    logits = np.array([[0, 1, 0, 1, 0, 1]], np.float32)
    assert session.run(None, {"logits": logits})[1].tolist() == [[1, 3, 5, 0]]


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"k": 9}, "can't choose 9 of 8 experts"),
        ({"k": 2, "groups": 3}, "no 3 equal groups"),
        ({"k": 2, "groups": 4, "best_groups": 2, "per_group": 3}, "their 3 largest"),
        ({"k": 2, "scores": "tanh"}, "unknown scores 'tanh'"),
    ],
)
def test_wrong_routes_are_refused(op_session: Any, attrs: dict[str, Any], message: str) -> None:
    outputs = {"weights": "f32", "ids": "i64"}
    with pytest.raises(Exception, match=message):
        op_session("Route", {"logits": "f32"}, outputs, experts=8, **({"scores": "none"} | attrs))


def moe_session(op_session: Any, packed: list[PackedExperts], **attrs: Any) -> Any:
    gate, _, down = packed
    inputs = {"x": "f32", "weights": "f32", "ids": "i64"}
    return op_session(
        "MoE",
        inputs,
        {"y": "f32"},
        weights={n: w.data for n, w in zip(("gate", "up", "down"), packed, strict=True)},
        activation="silu",
        **{f"{n}_format": w.format for n, w in zip(("gate", "up", "down"), packed, strict=True)},
        **({"experts": gate.experts, "k": gate.k, "m": gate.n, "n": down.n} | attrs),
    )


def experts(fmt: kernels.Format) -> list[PackedExperts]:
    rng = np.random.default_rng(3)
    shapes = ((4, 256, 256), (4, 256, 256), (4, 40, 256))
    return [PackedExperts.quantized(rng.standard_normal(s, np.float32), fmt) for s in shapes]


@pytest.mark.parametrize("fmt", kernels.FORMATS)
@pytest.mark.parametrize("lead", [(1,), (2, 20), (0,)])
def test_moe(op_session: Any, fmt: kernels.Format, lead: tuple[int, ...]) -> None:
    """The session has the bits of the plain kernel."""
    packed = experts(fmt)
    rng = np.random.default_rng(4)
    x, weights = (rng.standard_normal((*lead, n), np.float32) for n in (256, 2))
    ids = rng.integers(0, 4, (*lead, 2))
    (y,) = moe_session(op_session, packed).run(None, {"x": x, "weights": weights, "ids": ids})
    flat = (x.reshape(-1, 256), weights.reshape(-1, 2), ids.reshape(-1, 2))
    np.testing.assert_array_equal(y.reshape(-1, 40), kernels.moe(*flat, *packed))


def test_an_expert_that_does_not_exist_is_named(op_session: Any) -> None:
    session = moe_session(op_session, experts("f32"))
    feeds = {"x": np.zeros((1, 256), np.float32), "weights": np.zeros((1, 2), np.float32)}
    with pytest.raises(Exception, match=r"spike.MoE 'the_MoE': expert 4 is not one of 4"):
        session.run(None, feeds | {"ids": np.array([[1, 4]])})
    with pytest.raises(Exception, match="don't belong together"):
        session.run(None, feeds | {"ids": np.array([[1], [2]])})


def test_stacks_of_another_size_are_refused(op_session: Any) -> None:
    with pytest.raises(Exception, match="weight at input 3: has"):
        moe_session(op_session, experts("f32"), experts=5)


COMMON = {"hidden_size": 64, "num_experts_per_tok": 2, "intermediate_size": 32}


def module_of(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    module = kind(config).eval()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
    return module


def halves(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return packed.chunk(2, 1)


def assert_same(got: torch.Tensor, module: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        result = module(x[None])
    want = (result[0] if isinstance(result, tuple) else result).reshape(got.shape)
    assert ((got - want).norm() / want.norm()).item() <= MODULE_ERROR


X = torch.randn(30, 64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (MixtralSparseMoeBlock, MixtralConfig(**COMMON, num_local_experts=4)),
        (
            Qwen3MoeSparseMoeBlock,
            Qwen3MoeConfig(**COMMON, num_experts=4, moe_intermediate_size=32, norm_topk_prob=True),
        ),
    ],
    ids=["mixtral", "qwen3_moe"],
)
def test_softmax_routing_is_transformers_own(kind: Any, config: Any) -> None:
    module = module_of(kind, config)
    weights, ids = reference("route", X @ module.gate.weight.T, k=2, normalise=True)
    gate, up = halves(module.experts.gate_up_proj)
    assert_same(reference("moe", X, weights, ids, gate, up, module.experts.down_proj), module, X)


def test_grouped_sigmoid_routing_is_deepseeks() -> None:
    config = DeepseekV3Config(
        **COMMON, moe_intermediate_size=32, n_routed_experts=8, n_group=4, topk_group=2
    )
    module = module_of(DeepseekV3MoE, config)
    weights, ids = reference(
        "route",
        X @ module.gate.weight.T,
        module.gate.e_score_correction_bias,
        k=2,
        scores="sigmoid",
        groups=4,
        best_groups=2,
        per_group=2,
        normalise=True,
        eps=1e-20,
        scale=config.routed_scaling_factor,
    )
    gate, up = halves(module.experts.gate_up_proj)
    routed = reference("moe", X, weights, ids, gate, up, module.experts.down_proj)
    with torch.no_grad():
        shared = module.shared_experts(X)
    assert_same(routed + shared, module, X)


def test_the_clamped_product_is_gpt_oss() -> None:
    module = module_of(GptOssMLP, GptOssConfig(**COMMON, num_local_experts=4))
    router, stack = module.router, module.experts
    logits = torch.nn.functional.linear(X, router.weight, router.bias)
    weights, ids = reference("route", logits, k=2, scores="none", softmax_chosen=True)
    biases = [stack.gate_up_proj_bias[:, ::2], stack.gate_up_proj_bias[:, 1::2]]
    matrices = [stack.gate_up_proj.mT[:, ::2], stack.gate_up_proj.mT[:, 1::2], stack.down_proj.mT]
    operands = [*matrices, *biases, stack.down_proj_bias]
    got = reference("moe", X, weights, ids, *operands, limit=stack.limit, alpha=stack.alpha)
    assert_same(got, module, X)
