"""aten graph -> traced IR: one small function per aten op, looked up in a table.

Everything the IR cannot express is collected and reported in one error, with the module and the
source line of the model's code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node as FxNode

from ...errors import ExitCode, SpikeError
from ..ir import Builder, Constant, DType, Graph, Level, State, TensorType, Value, symbol, verify
from . import lower_blocks, lower_math, lower_reduce, lower_shape
from .cache_slots import PAST_AXIS
from .lower_call import LOWERINGS, Call, by_schema
from .lower_complex import PAIRS_ONLY, has_pair, lower_pairs
from .lower_dims import DimTable
from .trace import PREFIX, Traced

_ = (lower_blocks, lower_math, lower_reduce, lower_shape)  # imported for their entries in the table
_CHECKS = re.compile(r"aten\.(_assert\w*|sym_constrain_range\w*)\.")
_SHOWN = 20  # places listed in an error

Canonical = Callable[[str], str]


@dataclass(frozen=True)
class Refusal:
    """One call that could not be lowered."""

    op: str
    scope: str
    source: str
    reason: str

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.op} in {self.scope or 'the model'}{why} at {self.source or 'unknown line'}"


def lower(traced: Traced, canonical: Canonical = str, name: str = "model") -> Graph:
    """The IR of a traced step, verified.

    Args:
        canonical: one name for all names of a tied parameter (`Checkpoint.canonical`).
        name: of the graph.

    Raises: SPK201 listing every op that the IR lacks, SPK207 if an input's size is fixed.
    """
    graph = _Lowering(traced, canonical, Graph(name, Level.TRACED)).run()
    graph.sweep()
    verify(graph)
    return graph


class _Lowering:
    def __init__(self, traced: Traced, canonical: Canonical, graph: Graph) -> None:
        self.traced = traced
        self.canonical = canonical
        self.graph = graph
        self.builder = Builder(graph)
        self.nodes: list[FxNode] = list(traced.exported.graph.nodes)
        self.dims = DimTable(self._symbols(), traced.longest)
        self.values: dict[FxNode, Any] = {}
        self.refused: list[Refusal] = []

    def _user_inputs(self) -> list[FxNode]:
        names = set(self.traced.exported.graph_signature.user_inputs)
        return [n for n in self.nodes if n.op == "placeholder" and n.name in names]

    def _symbols(self) -> dict[str, str]:
        """torch's symbol -> B, S or P, read off the inputs."""
        tokens, _positions, *pasts = self._user_inputs()
        sizes = [(tokens, 0, "B")] + ([] if self.traced.stepwise else [(tokens, 1, "S")])
        grows = (slot.grows for slot in self.traced.slots)
        sizes += [(p, PAST_AXIS, "P") for p, grown in zip(pasts, grows, strict=True) if grown]
        names = {}
        for node, axis, ours in sizes:
            size = node.meta["val"].shape[axis]
            if isinstance(size, int):
                raise SpikeError(
                    "SPK207",
                    "lowering",
                    f"the model's code fixes {ours} (axis {axis} of {node.name}) to {size}.",
                    "Such a model needs a change in its modelling code; report it.",
                    ExitCode.UNSUPPORTED,
                )
            names[str(size.node.expr)] = ours
        return names

    def run(self) -> Graph:
        self._inputs()
        for node in self.nodes:
            if node.op == "call_function":
                self.values[node] = self._call(node)
        if self.refused:
            raise _refusal(self.refused)
        self._outputs()
        return self.graph

    def _inputs(self) -> None:
        """Placeholders: parameters and buffers become constants, the rest inputs and states."""
        signature = self.traced.exported.graph_signature
        tokens, positions, *pasts = self._user_inputs()
        step = TensorType(DType.I64, (symbol("B"), 1 if self.traced.stepwise else symbol("S")))
        self.values[tokens] = self.builder.input("tokens", step)
        self.values[positions] = self.builder.input("positions", step)
        for node, slot in zip(pasts, self.traced.slots, strict=True):
            first, *rest = slot.shape
            sizes = (first, symbol("P"), rest[-1]) if slot.grows else slot.shape
            shape = TensorType(DType.F32, (symbol("B"), *sizes))
            past = self.builder.input(f"{slot.name}.past", shape)
            axis, kind = (PAST_AXIS, "kv") if slot.grows else (0, "fixed")
            self.graph.states[slot.name] = State(slot.name, past.type, axis, kind, input=past)
            self.values[node] = past
        for node in self.nodes:
            if node.op == "placeholder" and node not in self.values:
                self.values[node] = self._constant(node, signature)

    def _constant(self, node: FxNode, signature: Any) -> Constant:
        exported = self.traced.exported
        stored = signature.inputs_to_parameters.get(node.name)
        buffer = signature.inputs_to_buffers.get(node.name)
        if buffer is not None and buffer not in signature.non_persistent_buffers:
            stored = buffer
        if stored is not None:
            shape = tuple(int(s) for s in node.meta["val"].shape)
            return self.builder.parameter(
                self.canonical(stored.removeprefix(PREFIX)), TensorType(DType.F32, shape)
            )
        held = buffer or signature.inputs_to_lifted_tensor_constants[node.name]
        return self.builder.data(
            held.removeprefix(PREFIX), exported.constants[held].detach().cpu().numpy()
        )

    def _call(self, node: FxNode) -> Any:
        traced = node.meta.get("val")
        if _CHECKS.match(str(node.target)):
            return None
        if isinstance(traced, int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
            return traced
        if node.target is operator.getitem:
            source, index = node.args
            return self.values[source][index]
        try:
            return self._lowered(node, traced)
        except (ValueError, TypeError) as error:
            self._refuse(node, str(error))
            return _stand_in(traced)

    def _lowered(self, node: FxNode, traced: Any) -> Any:
        function = LOWERINGS.get(node.target)
        if function is None and node.target not in PAIRS_ONLY:
            raise ValueError("")
        arguments = {
            name: self._argument(value)
            for name, value in by_schema(node.target, node.args, node.kwargs).items()
        }
        if any(_is_missing(value) for value in arguments.values()):
            return _stand_in(traced)
        op = str(node.target).removeprefix("aten.")

        def make(given: Mapping[str, Any], result: Any) -> Call:
            return Call(op, node.name, scope_of(node), given, result, self.builder, self.dims)

        if has_pair(arguments):
            result = lower_pairs(node.target, arguments, traced, make)
        else:
            assert function is not None
            result = function(make(arguments, traced))
        call = make(arguments, traced)
        if not isinstance(result, Value | Constant):
            return result
        call = make(arguments, traced)
        if result.shape != call.shape:
            raise ValueError(f"its result is {result.type} here, {call.type} in the trace")
        return call.cast(result, call.type.dtype)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, FxNode):
            value = self.values[value]
        if isinstance(value, list | tuple):
            return [self._argument(v) for v in value]
        if isinstance(value, torch.SymInt):
            return self.dims.dim(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise ValueError(f"it takes {value}, which is computed from sizes")
        return value

    def _refuse(self, node: FxNode, reason: str) -> None:
        self.refused.append(Refusal(str(node.target), scope_of(node), source_of(node), reason))

    def _outputs(self) -> None:
        (output,) = (n for n in self.nodes if n.op == "output")
        logits, *presents = (self.values[n] for n in output.args[0])
        self.graph.outputs = [logits]
        for slot, present in zip(self.traced.slots, presents, strict=True):
            self.graph.states[slot.name].output = present


class _Missing:
    """The result of a refused call: calls that take it are skipped, not reported again."""


def _is_missing(value: Any) -> bool:
    return isinstance(value, _Missing) or (
        isinstance(value, list) and any(isinstance(v, _Missing) for v in value)
    )


def _stand_in(traced: Any) -> Any:
    return [_Missing() for _ in traced] if isinstance(traced, list | tuple) else _Missing()


def scope_of(node: FxNode) -> str:
    """Module path of a traced node, such as ``model.layers.3.self_attn``."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return re.sub(r"[^\w.]", "_", path.removeprefix(PREFIX.rstrip(".")).removeprefix("."))


def source_of(node: FxNode) -> str:
    """``file:line code`` of the model's line that made the node; torch's own frames are skipped."""
    frames = re.findall(
        r'File "(.*?)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or ""
    )
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    return f"{own[-1][0]}:{own[-1][1]} {own[-1][2]}" if own else ""


def _refusal(refused: list[Refusal]) -> SpikeError:
    ops = sorted({r.op for r in refused})
    seen: dict[tuple[str, str, str], Refusal] = {}
    for refusal in refused:
        seen.setdefault((refusal.op, refusal.source, refusal.reason), refusal)
    lines = [str(r) for r in seen.values()]
    more = f"\n  and {len(lines) - _SHOWN} more places" if len(lines) > _SHOWN else ""
    return SpikeError(
        "SPK201",
        "lowering",
        f"the IR cannot express {len(ops)} op(s) of this model: {', '.join(ops)}.\n  "
        + "\n  ".join(lines[:_SHOWN])
        + more
        + "\n",
        "Each needs one entry in compiler/frontend/lower_*.py (and an op in compiler/ir if its "
        "meaning is new); report the model type.",
        ExitCode.UNSUPPORTED,
    )
