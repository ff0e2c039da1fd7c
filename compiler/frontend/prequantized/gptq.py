"""GPTQ as AutoGPTQ, GPTQModel and optimum store it.

A linear layer of K inputs and N outputs, `bits` per code, groups of `group_size` inputs:

    qweight  i32 [K * bits / 32, N]   codes of one output run down the column, dense bit stream
    scales   f16 [G, N]
    qzeros   i32 [G, N * bits / 32]   zero points of one group run along the row, dense bit stream
    g_idx    i32 [K]                  group of each input; absent without act-order in some files

    weight[n, k] = scales[g, n] * (code - zero),  g = g_idx[k]

Version 1 (`gptq`) stores zero - 1 modulo 2**bits, version 2 (`gptq_v2`) the zero point itself. A
symmetric layer's zero point is 2**(bits - 1) whatever the label says: files exist that are labelled
version 1 and hold version 2 (vllm-project/vllm#38966), so there the stored values decide.

Source: `GPTQQuantLinear.dequantize_weight` of GPTQModel 7, `qlinear_cuda_old` of AutoGPTQ 0.7. They
compute in the dtype of the scales, so they round each product to fp16; we don't.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from transformers.pytorch_utils import Conv1D

from ....errors import SpikeError
from ..safetensors_file import StoredTensor
from .integers import Integers, runs, unpack_words, words_for
from .packed import (
    SCALES,
    Packed,
    Parts,
    ReadTensor,
    Scheme,
    require_form,
    require_matrix,
    require_parts,
    split_leaf,
)
from .precision import Precision
from .settings import Settings

PARTS = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GptqMatrix(Packed):
    """One GPTQ layer.

    Args:
        bits: of a code.
        group_size: inputs per group; K if there is one group.
        symmetric: every zero point is the middle of the range.
        minus_one: zero points are stored minus one.
        inputs_first: the model keeps this weight as [K, N] (GPT-2's Conv1D).
    """

    bits: int
    group_size: int
    symmetric: bool
    minus_one: bool
    inputs_first: bool

    @property
    def columns(self) -> int:
        """K."""
        return self.shape[0] if self.inputs_first else self.shape[1]

    def check_values(self, read: ReadTensor) -> str | None:
        """Group indices in range, and one zero point in a symmetric layer."""
        if "g_idx" in self.parts:
            self._check_groups(read(self.parts["g_idx"].name))
        if not self.symmetric:
            return None
        stored = self._stored_zeros(read)
        middle = 1 << (self.bits - 1)
        expected = middle - 1 if self.minus_one else middle
        if bool((stored == expected).all()):
            return None
        other = middle if self.minus_one else middle - 1
        if bool((stored == other).all()):
            return (
                f"zero points are stored as {other}, which contradicts the settings' GPTQ version; "
                f"the weights are symmetric, so the zero point is {middle}"
            )
        wrong = int(stored[(stored != expected).nonzero(as_tuple=True)][0])
        raise SpikeError(
            "SPK144",
            "checkpoint",
            f"the quantisation settings say that the weights are symmetric, but "
            f"{self.parts['qzeros'].name} holds the zero point {wrong} (stored), not {expected}.",
            'Set "sym": false if the weights are asymmetric, or download the checkpoint again.',
        )

    def _check_groups(self, indices: torch.Tensor) -> None:
        groups = self.parts["scales"].shape[0]
        wrong = ((indices < 0) | (indices >= groups)).nonzero().flatten()
        if len(wrong):
            at = int(wrong[0])
            raise SpikeError(
                "SPK143",
                "checkpoint",
                f"{self.parts['g_idx'].name}[{at}] is {int(indices[at])}, but the layer has "
                f"{groups} groups ({len(wrong)} indices are out of range).",
                "Download the checkpoint again.",
            )

    def _stored_zeros(self, read: ReadTensor) -> torch.Tensor:
        """uint8 [G, N], as stored."""
        outputs = self.parts["scales"].shape[1]
        return unpack_words(read(self.parts["qzeros"].name), self.bits, outputs)

    def integers(self, read: ReadTensor) -> Integers:
        """Outputs first, whatever the model's layout."""
        scales = read(self.parts["scales"].name).t()
        if self.symmetric:
            zeros = torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.int16)
        else:
            zeros = self._stored_zeros(read).t().to(torch.int16)
            zeros = (zeros + self.minus_one) & ((1 << self.bits) - 1)

        def codes() -> torch.Tensor:
            words = read(self.parts["qweight"].name)
            return unpack_words(words, self.bits, self.columns, dim=0).t().contiguous()

        return Integers(
            self.bits, self.columns, scales, zeros, codes, self._groups(read), self.inputs_first
        )

    def _groups(self, read: ReadTensor) -> torch.Tensor | None:
        """None where groups are runs of equal length, also if `g_idx` says so at length."""
        in_order = runs(self.columns, self.group_size)
        if "g_idx" not in self.parts:
            return in_order
        indices = read(self.parts["g_idx"].name).long()
        plain = torch.arange(self.columns) // self.group_size
        return in_order if torch.equal(indices, plain) else indices

    def precision(self, read: ReadTensor) -> Precision:
        """By scales and zero points."""
        return self.integers(read).precision()

    def load(self, read: ReadTensor) -> torch.Tensor:
        """scale * (code - zero point), exact in float32."""
        values = self.integers(read).values()
        return values.t().contiguous() if self.inputs_first else values


class Gptq(Scheme):
    """All GPTQ layers of a checkpoint; they share their settings.

    Raises: SPK140 for settings that contradict each other.
    """

    def __init__(self, settings: Settings, conv1d: Collection[str] = ()) -> None:
        bits = settings.integer("bits", "w_bit")
        self.bits = settings.one_of(bits, BITS, "bits")
        self.group_size = settings.group_size("group_size", "q_group_size", default=-1)
        self.symmetric = settings.flag("sym", default=True)
        version = settings.word("checkpoint_format", "format", default="gptq")
        self.minus_one = version == "gptq"
        self.conv1d = conv1d
        size = "whole rows" if self.group_size == -1 else f"groups of {self.group_size}"
        order = ", act-order" if settings.flag("desc_act", default=False) else ""
        kind = "symmetric" if self.symmetric else "asymmetric"
        self.label = f"GPTQ, {bits} bits, {size}, {kind}{order}"

    def part(self, entry: StoredTensor) -> tuple[str, str] | None:
        """By name alone."""
        return split_leaf(entry.name, PARTS)

    def packed(self, name: str, parts: Parts, read: ReadTensor) -> GptqMatrix:
        """Checks every shape against the codes'."""
        require_parts(name, parts, ("qweight", "qzeros", "scales"), self.label)
        codes = parts["qweight"]
        require_matrix(codes, ("I32",), "codes in 32-bit words")
        rows, outputs = codes.shape
        columns = rows * 32 // self.bits
        if "g_idx" in parts:  # says K also where the last word isn't full
            count = next(iter(parts["g_idx"].shape), 0)
            fits = words_for(count, self.bits) == rows
            columns = count if fits else columns
            require_form(parts["g_idx"], ("I32", "I64"), [(columns,)], f"{columns} inputs")
        size = columns if self.group_size == -1 else min(self.group_size, columns)
        groups = -(-columns // size)
        why = f"{columns} inputs in groups of {size}, {outputs} outputs"
        require_form(parts["scales"], SCALES, [(groups, outputs)], why)
        width = words_for(outputs, self.bits)
        require_form(parts["qzeros"], ("I32",), [(groups, width)], f"{why}, {self.bits} bits")
        inputs_first = _is_conv1d(name, self.conv1d)
        shape = (columns, outputs) if inputs_first else (outputs, columns)
        return GptqMatrix(
            name, parts, shape, self.bits, size, self.symmetric, self.minus_one, inputs_first
        )


def conv1d_modules(model: torch.nn.Module) -> frozenset[str]:
    """Paths of modules that keep their weight as [K, N]."""
    return frozenset(path for path, module in model.named_modules() if isinstance(module, Conv1D))


def _is_conv1d(weight: str, modules: Collection[str]) -> bool:
    """Stored names may lack, or have, the base model's prefix."""
    module = weight.removesuffix(".weight")
    return any(f".{path}".endswith(f".{module}") or f".{module}".endswith(f".{path}")
               for path in modules)  # fmt: skip
