"""What a network holds of a constant: values rounded to its element type, or int4 blocks.

The one place that rounds: the emitted bytes, the checker's expectation and the gate's emulation
must be the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch

from ....errors import ExitCode, SpikeError
from ...ir import DType
from ...ir.primitives import TORCH_DTYPE

if TYPE_CHECKING:
    from .plan import Stored

INT4_FORMAT = "int4_sym"
INT4_BLOCK = 32
_INTEGERS = {"i32": np.int32, "bool": np.bool_}


@dataclass(frozen=True)
class Int4Matrix:
    """A matrix [N, K] in storage format ``int4_sym``: value = nibble * scale of its block.

    Args:
        packed: uint8 [N, K / 2]; two signed nibbles (-8..7) a byte, the lower k in the low one.
        scales: f16 [N, K / 32], all above zero.
    """

    packed: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def values(self, dtype: str) -> npt.NDArray[np.float32]:
        """f32 [N, K]: products of nibbles and scales that are kept in `dtype`.

        The dequantise layer rounds them to that type once more.
        """
        return dequantised(self.packed, widened(self.stored_scales(dtype), dtype))

    def stored_scales(self, dtype: str) -> npt.NDArray[Any]:
        """The scales as a network holds them: of the type that the values are computed in."""
        return rounded(self.scales.astype(np.float32), dtype)


Constants = Callable[[str], "npt.NDArray[Any] | Int4Matrix"]
"""The values of a graph's constant by its name: floats in the constant's own shape, or int4 blocks
where its format says so."""


def dequantised(
    packed: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """packed uint8 [..., K / 2] and scales [..., K / block] to f32 [..., K]."""
    nibbles = np.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], -1)
    signed = (nibbles.astype(np.int8) ^ 8) - 8
    block = signed.shape[-1] // scales.shape[-1]
    return signed.astype(np.float32) * np.repeat(scales, block, -1)


def rounded(values: npt.NDArray[Any], dtype: str, name: str = "") -> npt.NDArray[Any]:
    """Values as stored in an element type: to nearest even; bf16 as the uint16 of its bits.

    Raises SpikeError SPK531 if a value is not finite, or is finite but not in f16.
    """
    if not np.issubdtype(values.dtype, np.floating):
        return np.ascontiguousarray(values, _INTEGERS[dtype])
    array = np.ascontiguousarray(values, np.float32)
    exact = torch.from_numpy(array if array.flags.writeable else array.copy())
    kept = exact.to(TORCH_DTYPE[DType(dtype)])
    if not bool(torch.isfinite(kept).all()):
        largest = float(exact.abs().nan_to_num(float("inf")).max())
        raise _unstorable(
            f"{name or 'a constant'} holds {largest:g}, which {dtype} does not.",
            "Build with --dtype bfloat16, whose range is that of float32.",
        )
    bits = kept.view(torch.uint16) if dtype == "bf16" else kept
    return cast("npt.NDArray[Any]", bits.numpy())


def widened(kept: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """What stored values mean: f32 for floats, integers as they are."""
    if dtype == "bf16":
        return (kept.astype(np.uint32) << 16).view(np.float32)
    if dtype == "f16":
        return cast("npt.NDArray[Any]", torch.from_numpy(kept).float().numpy())
    return kept


def stored_array(stored: Stored, constants: Constants) -> npt.NDArray[Any]:
    """The bytes of a network constant as an array; int4 values stay packed uint8.

    Raises SpikeError SPK531 if they can't be stored so.
    """
    tensor = stored.tensor
    if not stored.source:
        return _literal(stored)
    values = constants(stored.source)
    if isinstance(values, Int4Matrix):
        _check_blocks(values, stored.source)
        if tensor.dtype == "int4":
            return np.ascontiguousarray(values.packed)
        return values.stored_scales(tensor.dtype)
    return rounded(values, tensor.dtype, stored.source)


def digest(array: npt.NDArray[Any]) -> str:
    """SHA-256 of an array's bytes, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _literal(stored: Stored) -> npt.NDArray[Any]:
    dtype, shape = stored.tensor.dtype, tuple(d for d in stored.tensor.shape if isinstance(d, int))
    if stored.literal == "range":
        return np.arange(shape[-1], dtype=np.int32).reshape(shape)
    values = np.array(stored.literal, np.int32 if dtype == "i32" else np.float32)
    return rounded(values.reshape(shape), dtype)


def _check_blocks(matrix: Int4Matrix, name: str) -> None:
    k = matrix.shape[1]
    blocks = matrix.scales.shape
    if k % INT4_BLOCK or blocks != (matrix.shape[0], k // INT4_BLOCK):
        what = f"{name} {list(matrix.shape)} has scales {list(blocks)}: not one per {INT4_BLOCK}."
        raise _unstorable(what, "Store it in --dtype instead.")
    if not bool(np.all(np.isfinite(matrix.scales) & (matrix.scales > 0))):
        what = f"{name} has a block whose scale is not a finite number above zero."
        raise _unstorable(what, "Quantise it again: an all-zero block takes any scale.")


def _unstorable(what: str, remedy: str) -> SpikeError:
    return SpikeError("SPK531", "TensorRT", what, remedy, ExitCode.UNSUPPORTED)
