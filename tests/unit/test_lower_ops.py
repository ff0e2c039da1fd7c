"""Ops that few models use mean what torch means by them, over an axis of symbolic size."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spikeinfer.compiler.frontend.lower import lower
from spikeinfer.compiler.frontend.trace import Traced, digits_of, tokens_of, trace
from spikeinfer.compiler.ir import Graph, Interpreter
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH = 16, 8
Line = Callable[[Tensor], Tensor]


class Cacheless(nn.Module):
    """A causal model that keeps nothing: each token sees the sum of those before, and `line`."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.line = line
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids).cumsum(1)
        return SimpleNamespace(logits=self.head(x + self.line(x)))


def _traced(line: Line) -> Traced:
    with torch.device("meta"):
        model = Cacheless(line).eval()
    return trace(model, recompute=True)


def _outputs(graph: Graph, model: nn.Module, ids: Tensor, sizes: list[int]) -> Tensor:
    """Logits of `ids` given in steps of these sizes."""
    weights = dict(model.named_parameters())
    (state,) = graph.states
    run = Interpreter(graph, weights.__getitem__, {state: torch.zeros(len(ids), 1, 0, 3)})
    rows, start = [], 0
    with torch.no_grad():
        for size in sizes:
            step = torch.arange(start, start + size).expand(len(ids), -1)
            rows += run.run({"tokens": ids[:, start : start + size], "positions": step})
            start += size
    return torch.cat(rows, 1)


def _convolved(x: Tensor) -> Tensor:
    kernel = torch.arange(WIDTH * 4 * 2, dtype=torch.float32).reshape(WIDTH, 4, 2) / 50
    padded = functional.pad(x.transpose(1, 2), (1, 0))
    return functional.conv1d(padded, kernel, groups=2).transpose(1, 2)


def _sparse(x: Tensor) -> Tensor:
    """The sum of the three largest so far, by a top-k whose k depends on the length."""
    scores = x.sum(-1, keepdim=True) @ x.sum(-1, keepdim=True).mT
    scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
    best = scores.topk(min(3, scores.shape[-1]), dim=-1).values
    return best.clamp(min=-100.0).sum(-1, keepdim=True)


LINES: dict[str, Line] = {
    "windows": lambda x: functional.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).flip(-1)[..., 0],
    "norm": lambda x: x / (1 + torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
    "groups": _convolved,
    "differences": lambda x: torch.diff(x, dim=1, prepend=x[:, :1]),
    "quantile": lambda x: x * torch.special.erfinv(2 * torch.tensor(0.9) - 1),
    "log_sigmoid": functional.logsigmoid,
    "sparse": _sparse,
}


@pytest.mark.parametrize("name", LINES)
def test_recomputing_steps_equal_the_whole(name: str) -> None:
    """In steps of 4, 1 and 2 tokens; to 1e-4, for sums in another order."""
    torch.manual_seed(0)
    model = Cacheless(LINES[name]).eval()
    graph = lower(_traced(LINES[name]))
    assert list(graph.states) == ["layers.0.tokens"]
    ids = torch.randint(VOCAB, (2, 7))
    with torch.no_grad():
        want = model(ids).logits
    torch.testing.assert_close(_outputs(graph, model, ids, [4, 1, 2]), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kept_tokens_are_exact_in_every_format(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 1, 255, 256, 257, 65535, 65536, 262143, (1 << 24) - 1]])
    kept: Any = digits_of(ids).to(dtype)
    assert torch.equal(tokens_of(kept), ids)
