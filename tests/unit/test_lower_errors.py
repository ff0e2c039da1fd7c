"""Models that cannot be traced or lowered: code, cause and place are named (toy models)."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spikeinfer.compiler.frontend.lower import lower
from spikeinfer.compiler.frontend.trace import trace
from spikeinfer.compiler.ir import Graph, Interpreter
from spikeinfer.errors import ExitCode, SpikeError
from torch import Tensor, nn

Change = Callable[["Toy", Tensor, Any], Tensor]


class Block(nn.Module):
    """One cached value per token; `change` is the line under test."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.mix = nn.Linear(8, 8, bias=False)
        self.seen = nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        heads = self.mix(x).unsqueeze(1)
        keys, values = cache.update(heads, heads, 0)
        return self.change(self, x + keys.mean(2) + values[:, 0, -1:], cache)


class Toy(nn.Module):
    """A causal language model without any of transformers' base classes."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(change)])
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, cache: Any, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.layers[0](self.embed(input_ids), cache)))


def graph_of(change: Change) -> Graph:
    with torch.device("meta"):
        model = Toy(change).eval()
    return lower(trace(model))


def refusal(change: Change) -> SpikeError:
    with pytest.raises(SpikeError) as caught:
        graph_of(change)
    assert caught.value.exit_code is ExitCode.UNSUPPORTED
    return caught.value


def test_unknown_ops_are_all_listed_with_module_and_source_line() -> None:
    def change(block: Toy, x: Tensor, _: Any) -> Tensor:
        return torch.fft.fft(x + torch.special.i0(x)).real

    error = refusal(change)
    assert error.code == "SPK201"
    places = re.findall(r"(aten\.\S+) in (\S+) at \S*test_lower_errors.py:\d+ (.*)", error.what)
    called = {place[0] for place in places}
    assert {"aten.special_i0.default", "aten.fft_fft.default"} <= called
    assert all(f"{op}" in error.what.split("\n")[0] for op in called)
    assert {scope for _, scope, _ in places} == {"layers.0"}
    assert all(line.startswith("return self.change(self, x + keys") for *_, line in places)
    assert "lower_*.py" in error.remedy


def test_an_op_that_is_known_but_used_in_an_unknown_way_says_why() -> None:
    error = refusal(lambda _, x, __: torch.topk(x, 8, largest=False).values)
    assert error.code == "SPK201"
    assert "topk of the smallest is not in the IR" in error.what


def test_sizes_that_are_no_polynomial_are_refused() -> None:
    def change(_: Toy, x: Tensor, cache: Any) -> Tensor:
        half = (cache.get_seq_length() + 1) // 2
        return x + torch.ones(half).sum() * 0

    error = refusal(change)
    assert error.code == "SPK201"
    assert "not a polynomial in B, S and P" in error.what


def test_code_that_depends_on_values_is_refused_with_its_line() -> None:
    def change(_: Toy, x: Tensor, __: Any) -> Tensor:
        return x if x.sum() > 0 else -x

    error = refusal(change)
    assert error.code == "SPK202"
    assert "Toy cannot be traced" in error.what


def test_sizes_that_depend_on_values_are_refused() -> None:
    error = refusal(lambda _, x, __: x + x[x > 0].sum())
    assert error.code in ("SPK201", "SPK202")


def test_a_convolution_state_is_a_state_of_fixed_size() -> None:
    def change(_: Toy, x: Tensor, cache: Any) -> Tensor:
        seen = cache.update_conv_state(x.transpose(1, 2), 0, conv_kernel_size=3)
        return seen[..., -x.shape[1] :].transpose(1, 2)

    (state,) = (s for s in graph_of(change).states.values() if s.kind == "fixed")
    assert state.name == "layers.0.conv.0"
    assert state.type.shape[2] == 3


def test_a_model_without_a_cache_is_refused() -> None:
    class Stateless(Toy):
        def forward(self, input_ids: Tensor, cache: Any, use_cache: bool) -> SimpleNamespace:
            return SimpleNamespace(logits=self.head(self.embed(input_ids)))

    with torch.device("meta"):
        model = Stateless(lambda _, x, __: x)
    with pytest.raises(SpikeError, match=r"SPK203 .* keeps nothing in its cache"):
        trace(model)


def test_a_buffer_without_a_value_is_refused() -> None:
    with torch.device("meta"):
        model = Toy(lambda _, x, __: x)
        model.layers[0].register_buffer("scale", torch.ones(8), persistent=False)
    with pytest.raises(SpikeError, match=r"SPK205 .*buffer layers\.0\.scale of Toy"):
        trace(model)


@pytest.mark.parametrize(
    ("what", "special"),
    [
        ("a step of one token", lambda x, past: x.shape[1] == 1),
        ("a batch of one or an empty past", lambda x, past: x.shape[0] == 1),
        ("a batch of one or an empty past", lambda x, past: past == 0),
    ],
)
def test_another_path_for_a_size_of_one_is_refused(
    what: str, special: Callable[[Tensor, int], bool]
) -> None:
    """torch.export alone traces the usual path without a word."""

    def change(_: Toy, x: Tensor, cache: Any) -> Tensor:
        if special(x, cache.get_seq_length() - x.shape[1]):
            return torch.exp(x)
        return x

    error = refusal(change)
    assert error.code == "SPK207"
    assert f"Toy computes {what} in another way" in error.what
    assert "test_lower_errors.py:" in error.what


def test_a_step_that_changes_a_buffer_is_refused() -> None:
    def change(block: Toy, x: Tensor, _: Any) -> Tensor:
        block.seen.add_(1)
        return x + block.seen

    error = refusal(change)
    assert error.code == "SPK208"
    assert "layers.0.seen" in error.what


def test_in_place_ops_on_values_become_functional() -> None:
    """A write through a view reaches the tensor behind it."""

    def change(_: Toy, x: Tensor, __: Any) -> Tensor:
        y = x * 2
        y[:, :, :4].add_(1.0)
        y[:, :, 4:].copy_(x[:, :, :4])
        return y.mul_(3.0)

    torch.manual_seed(0)
    model = Toy(change).eval()
    graph = graph_of(change)
    assert not [n for n in graph.nodes if n.op.endswith("_")]
    states = {name: torch.zeros(2, 1, 0, 8) for name in graph.states}
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    run = Interpreter(graph, model.state_dict().__getitem__, dict(states))
    (got,) = run.run({"tokens": tokens, "positions": torch.arange(3).expand(2, 3)})

    cache = SimpleNamespace(update=lambda k, v, _: (k, v))
    want = model(tokens, cache, True).logits
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)  # the same ops in the same order
