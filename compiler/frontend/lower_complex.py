"""Complex tensors, which the IR lacks, as pairs of real ones: rotations written as products.

Only what keeps the parts apart or multiplies is known: `polar`, views, products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..ir import Operand, Tensor, Value
from .lower_call import LOWERINGS, Call, Unsupported, lowers

aten = torch.ops.aten
MOVING = {
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.expand.default, aten.slice.Tensor, aten.select.int, aten.transpose.int,
    aten.permute.default, aten.clone.default, aten.alias.default, aten.contiguous.default,
    aten.index_select.default, aten.to.device,
    aten.to.dtype_layout, aten.detach.default,
}  # fmt: skip
PAIRS_ONLY = {aten.view_as_real.default}


@dataclass(frozen=True)
class Pair:
    """A complex tensor."""

    real: Tensor
    imag: Tensor

    def parts(self) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.real, self.imag


@lowers("polar.default")
def polar(call: Call) -> Any:
    """abs * (cos angle + i sin angle)"""
    size, angle = call.tensor("abs"), call.tensor("angle")
    return Pair(*(call.emit("mul", size, call.emit(op, angle)) for op in ("cos", "sin")))


@lowers("view_as_complex.default")
def view_as_complex(call: Call) -> Any:
    """The last axis holds real and imaginary part."""
    x = call.tensor("self")
    last = x.type.rank - 1
    return Pair(*(call.reshape(call.slice(x, last, i, i + 1), x.shape[:last]) for i in (0, 1)))


def has_pair(arguments: Mapping[str, Any]) -> bool:
    """Whether a call takes a complex tensor."""
    return any(isinstance(value, Pair) for value in arguments.values())


def lower_pairs(
    target: Any, arguments: Mapping[str, Any], traced: Any, make: Callable[..., Call]
) -> Any:
    """A call that takes complex tensors. Raises Unsupported for most ops.

    Args:
        make: a Call of given arguments and traced result.
    """
    call = make(arguments, traced)
    if target is aten.view_as_real.default:
        x = arguments["self"]
        ends = [call.reshape(part, (*part.shape, 1)) for part in x.parts()]
        return call.emit("concat", *ends, axis=x.real.type.rank)
    if target is aten.mul.Tensor:
        return _product(call, arguments["self"], arguments["other"])
    if target in MOVING:
        real = SimpleNamespace(shape=traced.shape, dtype=torch.float32)
        parts = ({**arguments, "self": part} for part in arguments["self"].parts())
        moved: Any = [LOWERINGS[target](make(given, real)) for given in parts]
        return Pair(*moved)
    raise Unsupported("this op on complex numbers is not in the IR")


def _product(call: Call, x: Any, y: Any) -> Pair:
    def times(a: Operand, b: Operand) -> Value:
        return call.emit("mul", a, b)

    if isinstance(x, Pair) and isinstance(y, Pair):
        return Pair(
            call.emit("sub", times(x.real, y.real), times(x.imag, y.imag)),
            call.emit("add", times(x.real, y.imag), times(x.imag, y.real)),
        )
    pair, factor = (x, y) if isinstance(x, Pair) else (y, x)
    return Pair(times(pair.real, factor), times(pair.imag, factor))
