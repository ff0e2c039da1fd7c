"""In-place ops are renamed to functional ones only where no view can see the difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from spikeinfer.compiler.frontend.in_place import mutates, replace_plain_writes
from torch import Tensor


def scaled(x: Tensor) -> Tensor:
    y = x * 2
    y /= y.sum()
    return y.reshape(-1) + 1


def written_twice(x: Tensor) -> Tensor:
    y = x.exp()
    z = y.add_(1.0)
    y.mul_(z)
    return y + z


def top_scores(x: Tensor) -> Tensor:
    values, _ = torch.topk(x, 2)
    before = values + 1
    values /= values.sum()
    return values - before


def through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y[:, :2].add_(1.0)
    return y


def seen_by_a_view(x: Tensor) -> Tensor:
    y = x * 2
    flat = y.reshape(-1)
    y.add_(1.0)
    return flat + 1


def seen_by_a_view_of_an_earlier_write(x: Tensor) -> Tensor:
    y = (x * 2).add_(1.0)
    flat = y.reshape(-1)
    y.mul_(3.0)
    return flat + 1


def of_a_piece(x: Tensor) -> Tensor:
    y = x * 2
    left, right = y.split(2, 1)
    left.add_(right)
    return y


def of_an_input(x: Tensor) -> Tensor:
    return x.add_(1.0) * 2


@pytest.mark.parametrize("function", [scaled, written_twice, top_scores])
def test_plain_writes_are_renamed(function: Callable[[Tensor], Tensor]) -> None:
    module = _exported(function)
    assert replace_plain_writes(module.graph)
    assert not any(mutates(node) for node in module.graph.nodes)
    module.graph.lint()
    module.recompile()
    x = torch.arange(8.0).reshape(2, 4) / 8
    torch.testing.assert_close(module(x)[0], function(x.clone()), atol=0, rtol=0)  # same ops


@pytest.mark.parametrize(
    "function",
    [through_a_view, seen_by_a_view, seen_by_a_view_of_an_earlier_write, of_a_piece, of_an_input],
)
def test_writes_that_others_see_are_left_to_torch(function: Callable[[Tensor], Tensor]) -> None:
    module = _exported(function)
    before = str(module.graph)
    assert not replace_plain_writes(module.graph)
    assert str(module.graph) == before


def _exported(function: Callable[[Tensor], Tensor]) -> torch.fx.GraphModule:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    with torch.no_grad():
        exported = torch.export.export(Model(), (torch.zeros(2, 4),), strict=False)
    assert any(mutates(node) for node in exported.graph.nodes)
    return exported.graph_module
