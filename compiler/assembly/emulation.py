"""What the golden gate runs for a TensorRT engine on a machine without a GPU.

The placed graph, on the reference interpreter, with the very numbers that the network holds: int4
values times their scales, everything in the element type that the network has it in, and every
result rounded where the network's is. That certifies the graph and the weights that went into the
engine; the device's kernels, which sum in another order, have not run.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from ..analysis import prefill
from ..backends.tensorrt import Constants, Int4Matrix, NetworkPlan
from ..backends.tensorrt.constants import rounded, widened
from ..golden import Prompt, Scorer, digest, probe_tokens
from ..golden.sets import GoldenSet, Provenance
from ..ir import Graph, Interpreter, parse_graph, print_graph
from .evidence import Scorers

EXECUTED = (
    "the placed graph on the reference interpreter, with the network's int4 and half-precision "
    "numbers; the engine's own kernels have not run"
)
SINGLE_STEPS = 16
"""Tokens at a sequence's end that the decode scorer takes one at a time."""
PIECE = 48
"""Tokens of a chunk before them."""
TOP_K, PROBES = 32, 16


class Emulation:
    """Logits of a network, computed here.

    Args:
        graph: the placed graph that the plan was made from.
        plan: tells the element type of each constant.
        constants: as the network gets them.
        longest: tokens of one sequence.
    """

    def __init__(self, graph: Graph, plan: NetworkPlan, constants: Constants, longest: int) -> None:
        self._graph = _by_own_names(graph)
        types: dict[str, set[str]] = {}
        for stored in plan.constants.values():
            if stored.source and stored.tensor.dtype != "int4":  # whose scales have the type
                types.setdefault(stored.source, set()).add(stored.tensor.dtype)
        self._values = _Values(constants, types)
        self._longest = longest

    def scorers(self) -> Scorers:
        """For the golden gate."""
        return Scorers(self.prefill, self.decode, self._longest)

    def prefill(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Logits of a whole sequence at once, f32 ``[T, V]``."""
        return self._run(tokens, [len(tokens)])

    def decode(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """The same in chunks, and token by token at the end."""
        first = max(0, len(tokens) - SINGLE_STEPS)
        cuts = [*range(PIECE, first, PIECE), *range(first, len(tokens)), len(tokens)]
        return self._run(tokens, [c for c in cuts if c > 0])

    def _run(self, tokens: list[int], cuts: list[int]) -> npt.NDArray[np.float32]:
        (whole,), states = prefill(self._graph, [tokens], len(tokens))
        runner = Interpreter(self._graph, self._values, states)
        logits, start = [], 0
        with torch.inference_mode():
            for cut in cuts:
                logits.append(runner.run({n: v[:, start:cut] for n, v in whole.items()})[0][0])
                start = cut
        result: npt.NDArray[np.float32] = torch.cat(logits).float().numpy()
        return result


class _Values:
    """Tensors of constants as the interpreter asks for them, kept while they are few."""

    MOST = 4 << 30
    """Bytes kept as f32; of larger models each is made again when it is needed."""

    def __init__(self, constants: Constants, types: Mapping[str, set[str]]) -> None:
        self._constants, self._types = constants, types
        self._kept: dict[str, torch.Tensor] = {}
        self._room = self.MOST

    def __call__(self, name: str) -> torch.Tensor:
        if name in self._kept:
            return self._kept[name]
        values = self._values(name)
        if values.nbytes <= self._room:
            self._room -= values.nbytes
            self._kept[name] = values
        return values

    def _values(self, name: str) -> torch.Tensor:
        found, types = self._constants(name), self._types.get(name, {"f32"})
        # Used in two element types: the wider one, which both are made from.
        dtype = next(iter(types)) if len(types) == 1 else "f32"
        exact = found.values(dtype) if isinstance(found, Int4Matrix) else found
        kept = widened(rounded(exact, dtype, name), dtype)
        return torch.from_numpy(np.array(kept))


def _by_own_names(graph: Graph) -> Graph:
    """A copy whose parameters are asked for by the constants' names, whole."""
    copy = parse_graph(print_graph(graph))
    for const in copy.constants.values():
        if const.parameter is not None:
            const.parameter = const.name
            const.rows, const.transposed, const.plus = None, False, 0.0
    return copy


def device_check(
    name: str,
    windows: list[list[int]],
    score: Scorer,
    made: Provenance,
) -> GoldenSet:
    """What `spike verify --on-device` compares the engine's own logits with."""
    logits = score(windows[0])
    width = logits.shape[1]
    probes = probe_tokens(width, min(PROBES, width))
    prompts = []
    for index, tokens in enumerate(windows):
        logits = logits if index == 0 else score(tokens)
        prompt = Prompt(f"p{index}", tokens=tuple(tokens))
        prompts.append(digest(prompt, tokens, [], logits, min(TOP_K, width - 1), probes))
    return GoldenSet(name, width, probes, tuple(prompts), made)
