"""The walk over all windows: the graph's own results, transformers' own inputs, bounded memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import pytest
import torch
from spikeinfer import SpikeError
from spikeinfer.compiler.calibrate import Moment, walk
from spikeinfer.compiler.frontend.lower import lower
from spikeinfer.compiler.frontend.trace import trace
from spikeinfer.compiler.ir import Constant, Graph, Interpreter, constant_tensor, evaluate_dim
from spikeinfer.passes.manager import run_pipeline
from spikeinfer.passes.pipeline import default_pipeline
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

LONGEST = 32
BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LONGEST,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2,
           "moe_intermediate_size": 48, "norm_topk_prob": True}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LONGEST},
    "gpt_neox": {"rotary_pct": 0.25},
    "phi3": {"sliding_window": 8},
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "gpt_oss": {**EXPERTS, "sliding_window": 8, "head_dim": 16},
}  # fmt: skip
RELATIVE = 1e-5
"""f32 products over another number of rows may sum in another order: K * 2^-24 a layer."""


@cache
def model(name: str, layers: int = 2) -> nn.Module:
    """A tiny model with random weights, norms and biases included."""
    options = {**BASE, **copy.deepcopy(MODELS[name])}
    options["num_hidden_layers"] = layers
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **options), attn_implementation="eager", dtype=torch.float32
    ).eval()
    for parameter in made.parameters():
        around = parameter.data if parameter.dim() == 1 else torch.zeros_like(parameter)
        parameter.data = around + 0.15 * torch.randn(parameter.shape)
    return made


@cache
def reference(name: str, layers: int = 2) -> Graph:
    """Its fused functional graph."""
    config = model(name, layers).config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        ).eval()
    tied = {id(p): n for n, p in reversed(list(empty.named_parameters(remove_duplicate=False)))}
    names = {n: tied[id(p)] for n, p in empty.named_parameters(remove_duplicate=False)}
    graph = lower(trace(empty, max_positions=LONGEST), lambda n: names.get(n, n), name)
    run_pipeline(graph, [p for p in default_pipeline() if p.name in ("clean", "raise", "fuse")])
    return graph


def parameters(name: str, layers: int = 2) -> Callable[[str], Tensor]:
    return model(name, layers).state_dict().__getitem__


def windows(count: int = 5, length: int = 24) -> Tensor:
    return torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(1))


def interpreted(name: str, tokens: Tensor, values: Callable[[str], Tensor]) -> Tensor:
    """Logits by the reference interpreter, all windows as one batch."""
    graph, (batch, length) = reference(name), tokens.shape
    sizes = {"B": batch, "P": 0}
    states = {
        s.name: torch.zeros([evaluate_dim(d, sizes) for d in s.type.shape])
        for s in graph.states.values()
    }
    positions = torch.arange(length).expand(batch, length)
    run = Interpreter(graph, values, dict(states))
    return run.run({"tokens": tokens, "positions": positions})[0]


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max() / y.abs().max())


def seen_by(name: str, *, full: bool = False, **options: Any) -> dict[str, Moment]:
    found: dict[str, Moment] = {}
    walk(
        reference(name), parameters(name), windows(),
        lambda const, seen: found.__setitem__(const.name, seen), full=full, **options,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_walk_that_replaces_nothing_gives_the_graphs_logits(name: str) -> None:
    logits = walk(
        reference(name), parameters(name), windows(), lambda *_: None, logits=True, threads=2
    )
    assert logits is not None
    expected = interpreted(name, windows(), parameters(name))
    assert relative(logits, expected) < RELATIVE
    with torch.no_grad():
        source = model(name)(windows(), use_cache=False).logits
    assert relative(logits, source) < RELATIVE


def hooked(name: str) -> dict[str, Tensor]:
    """X^T X f64 of every module with one weight matrix, as transformers calls it."""
    found: dict[str, Tensor] = {}

    def watch(parameter: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], *__: object) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            found[parameter] = found.get(parameter, 0) + x.T @ x

        return hook

    handles = []
    for path, module in model(name).named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            handles.append(module.register_forward_pre_hook(watch(f"{path}.weight")))
    with torch.no_grad():
        model(name)(windows(), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("full", [False, True])
def test_moments_are_those_of_the_modules_of_transformers(name: str, full: bool) -> None:
    expected, tied = hooked(name), 0
    for const_name, seen in seen_by(name, full=full).items():
        const = reference(name).constants[const_name]
        if len(const.shape) == 3:
            continue  # transformers has no module per expert: next test
        key = const.parameter if const.parameter in expected else "lm_head.weight"
        tied += key != const.parameter
        assert seen.count == windows().numel()
        assert relative(seen.diagonal, expected[key].diagonal()) < RELATIVE, const_name
        if full:
            assert relative(seen.sum.double(), expected[key]) < RELATIVE, const_name
    assert tied == (not any(c == "lm_head.weight" for c in reference(name).constants))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_see_the_tokens_routed_to_them(name: str) -> None:
    """Against the arguments that transformers' experts module gets, one expert at a time."""
    calls: dict[str, tuple[Tensor, ...]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, path=path: calls.__setitem__(path, tuple(args))
        )
        for path, module in model(name).named_modules()
        if path.endswith("experts")
    ]
    with torch.no_grad():
        model(name)(windows(), use_cache=False)
    for handle in handles:
        handle.remove()
    diagonal, full = seen_by(name), seen_by(name, full=True)
    stacks = {k: c for k, c in reference(name).constants.items() if len(c.shape) == 3}
    assert len(stacks) == 6
    for const_name, const in stacks.items():
        assert const.parameter is not None
        path, leaf = const.parameter.rsplit(".", 1)
        x, chosen, _ = calls[path]
        counts = diagonal[const_name].count
        assert isinstance(counts, Tensor)
        assert int(counts.sum()) == chosen.numel()
        for expert in range(6):
            rows = x.reshape(-1, x.shape[-1])[(chosen == expert).any(-1)]
            if leaf == "down_proj":
                packed = model(name).get_parameter(f"{path}.gate_up_proj")[expert]
                g, u = (rows @ packed.T).chunk(2, -1)
                rows = (nn.functional.silu(g) * u).detach()
            rows = rows.double()
            assert int(counts[expert]) == len(rows)
            if len(rows):
                gram = rows.T @ rows
                assert relative(full[const_name].sum[expert].double(), gram) < RELATIVE
                assert relative(diagonal[const_name].sum[expert], gram.diagonal()) < RELATIVE


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_what_a_visitor_returns_is_what_later_matrices_see(name: str) -> None:
    """The same logits and moments as of a graph that has the returned matrices from the start."""
    graph, given = reference(name), parameters(name)
    changed: dict[str, Tensor] = {}
    seen: dict[str, Moment] = {}

    def visit(const: Constant, moment: Moment) -> Tensor:
        assert const.name not in seen
        seen[const.name] = moment
        values = constant_tensor(const, given)
        changed[const.name] = values + 0.01 * values.roll(1, -1)
        return changed[const.name]

    logits = walk(graph, given, windows(), visit, logits=True)
    other: dict[str, Moment] = {}
    expected = walk(
        with_parameters(graph, changed.keys()),
        lambda name: changed[name] if name in changed else given(name.removeprefix("given ")),
        windows(),
        lambda const, moment: other.__setitem__(const.name, moment),
        logits=True,
    )
    assert logits is not None
    assert expected is not None
    assert torch.equal(logits, expected)
    assert relative(logits, interpreted(name, windows(), given)) > 100 * RELATIVE
    assert seen.keys() == other.keys()
    for key, moment in seen.items():
        assert torch.equal(moment.sum, other[key].sum), key


def with_parameters(graph: Graph, names: Collection[str]) -> Graph:
    """A copy whose products read matrices of these names from parameters of the same name; every
    other constant's parameter has "given" in front."""
    made = copy.deepcopy(graph)
    for const in made.constants.values():
        const.parameter = const.parameter and f"given {const.parameter}"
    for node in made.nodes:
        for i, const in enumerate(node.operands):
            if isinstance(const, Constant) and const.name in names and node.op != "embedding":
                node.operands[i] = Constant(const.name, const.type, parameter=const.name)
    return made


def test_matrices_with_one_input_share_one_moment() -> None:
    found = seen_by("llama")
    layer = "model.layers.0."
    q, k, v = (found[f"{layer}self_attn.{n}_proj.weight"] for n in "qkv")
    assert q is k is v
    gate, up = (found[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert gate is up
    assert gate is not q


def test_the_bits_do_not_depend_on_the_threads() -> None:
    one, three = (seen_by("mixtral", full=True, threads=n) for n in (1, 3))
    for name, seen in one.items():
        assert torch.equal(seen.sum, three[name].sum)
    assert torch.get_num_threads() >= 1


def test_an_input_that_is_not_finite_is_named() -> None:
    given = dict(model("llama").state_dict())
    name = "model.layers.1.input_layernorm.weight"
    given[name] = given[name].clone()
    given[name][3] = float("inf")
    with pytest.raises(SpikeError, match=r"SPK411 .*model\.layers\.1\.self_attn\.q_proj\.weight"):
        walk(reference("llama"), given.__getitem__, windows(), lambda *_: None)
