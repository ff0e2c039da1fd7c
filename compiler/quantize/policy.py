"""Which format each tensor is stored in: llama.cpp's mixes and TensorRT's, as one table of rules.

Source: `llama_tensor_get_type_impl` and `tensor_type_fallback` in llama.cpp's src/llama-quant.cpp
(as shipped in llama-cpp-python 0.3.36), so that quality and size can be compared tensor by tensor.
One difference, on purpose: no rule looks at the architecture's name: Falcon's own mix is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .names import Quantization
from .roles import UNQUANTIZED, VALUE_LIKE, Role

BLOCK = {"f32": 1, "f16": 1, "bf16": 1,
         "q8_0": 32, "q5_0": 32, "q5_1": 32, "q4_0": 32, "q4_1": 32,
         "q2_k": 256, "q3_k": 256, "q4_k": 256, "q5_k": 256, "q6_k": 256,
         "int4_sym": 32}  # fmt: skip
"""Elements per block; K must be a multiple."""

SMALLER_BLOCK = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""What takes the place of a format whose blocks are too long for K."""


SHORT = {f"{name}_short": name for name in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")}
"""Formats of 256 whose last block may be short, as a recipe or the solver asks for them; no mix
does, and GGUF has no such blocks."""

SHORT_MULTIPLE = 64
"""Elements that a short block is a multiple of."""


@dataclass(frozen=True)
class ModelFacts:
    """What the rules need to know about the whole model.

    Args:
        layers: decoder layers.
        heads: query heads.
        kv_heads: key/value heads.
        experts: experts per layer; 0 for a dense model.
        tied: whether the embedding is also the output head.
        weighed: whether importances weigh the quantiser's errors.
    """

    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    tied: bool = False
    weighed: bool = False


@dataclass(frozen=True)
class Case:
    """One tensor as a rule sees it: rows of `k`, number `index` of `count` in its group."""

    role: Role
    k: int
    index: int
    count: int
    model: ModelFacts

    @property
    def is_output(self) -> bool:
        """The head, also where it is the embedding."""
        return self.role == Role.OUTPUT or (self.role == Role.TOKEN_EMBD and self.model.tied)

    @property
    def is_value(self) -> bool:
        """Carries attention values."""
        return self.role in VALUE_LIKE

    @property
    def shares_values(self) -> bool:
        """Values of a 70B model, where eight heads share them."""
        return self.is_value and self.model.layers == 80 and self.model.kv_heads != self.model.heads

    @property
    def gets_more_bits(self) -> bool:
        """The first eighth of the layers, the last eighth, and every third one between."""
        first = self.count // 8
        return (
            self.index < first or self.index >= 7 * self.count // 8 or (self.index - first) % 3 == 2
        )


@dataclass(frozen=True)
class Rule:
    """If `applies`, the tensor is stored as `format`."""

    why: str
    format: str
    applies: Callable[[Case], bool]


# The first rule that applies decides; a tensor that none applies to gets the mix's base format.
_OUTPUT = (
    Rule("output head, K not in 256s", "q8_0", lambda c: c.is_output and c.k % 256 != 0),
    Rule("output head", "q6_k", lambda c: c.is_output),
)
_EIGHT_EXPERTS = (
    Rule("values, 8 experts", "q8_0", lambda c: c.is_value and c.model.experts == 8),
    Rule("keys, 8 experts", "q8_0", lambda c: c.role == Role.ATTN_K and c.model.experts == 8),
)
_OUTPUT_OF_EIGHT = (
    Rule("attention output, 8 experts", "q5_k",
         lambda c: c.role == Role.ATTN_OUTPUT and c.model.experts == 8),
)  # fmt: skip
_SHARED_VALUES = (
    Rule("values shared by many heads, 80 layers", "q5_k", lambda c: c.shares_values),
)
_MORE_BITS = (
    Rule("values, sensitive layer", "q6_k", lambda c: c.is_value and c.gets_more_bits),
    Rule("ffn_down, sensitive layer", "q6_k",
         lambda c: c.role == Role.FFN_DOWN and c.gets_more_bits),
)  # fmt: skip
_Q4_K_S = (
    Rule("values, first layers", "q5_k", lambda c: c.is_value and c.index < 4),
    Rule("ffn_down, first eighth", "q5_k",
         lambda c: c.role == Role.FFN_DOWN and c.index < c.count // 8),
)  # fmt: skip
_Q3_K_M = (
    Rule("values, first layers", "q5_k", lambda c: c.is_value and c.index < 2),
    Rule("values", "q4_k", lambda c: c.is_value),
    Rule("ffn_down, first sixteenth", "q5_k",
         lambda c: c.role == Role.FFN_DOWN and c.index < c.count // 16),
    Rule("ffn_down", "q4_k", lambda c: c.role == Role.FFN_DOWN),
    Rule("attention output", "q4_k", lambda c: c.role == Role.ATTN_OUTPUT),
)  # fmt: skip
_Q2_K = (
    Rule("values shared by four heads", "q4_k",
         lambda c: c.is_value and c.model.heads // max(1, c.model.kv_heads) >= 4),
    Rule("values", "q3_k", lambda c: c.is_value),
    Rule("ffn_down", "q3_k", lambda c: c.role == Role.FFN_DOWN),
    Rule("attention output", "q3_k", lambda c: c.role == Role.ATTN_OUTPUT),
)  # fmt: skip
# A gather can't read int4, and TensorRT-LLM's 4-bit modes leave the head alone, too.
_INT4_SYM = (
    Rule("embedding", "f16", lambda c: c.role == Role.TOKEN_EMBD),
    Rule("output head", "f16", lambda c: c.is_output),
)
_SMALL = _OUTPUT + _EIGHT_EXPERTS + _OUTPUT_OF_EIGHT


def _guarded(format: str) -> tuple[Rule, ...]:
    """With importances, the first down projections get a minimum besides their scale."""
    return (
        Rule("ffn_down, first eighth, with importances", format,
             lambda c: c.model.weighed and c.role == Role.FFN_DOWN and c.index < c.count // 8),
    )  # fmt: skip


MIXES: dict[Quantization, tuple[str, tuple[Rule, ...]]] = {
    Quantization.Q2_K: ("q2_k", _SMALL + _SHARED_VALUES + _Q2_K),
    Quantization.Q3_K_M: ("q3_k", _SMALL + _SHARED_VALUES + _Q3_K_M),
    Quantization.Q4_0: ("q4_0", _OUTPUT + _EIGHT_EXPERTS + _guarded("q4_1")),
    Quantization.Q4_1: ("q4_1", _OUTPUT + _EIGHT_EXPERTS),
    Quantization.Q4_K_S: ("q4_k", _SMALL + _SHARED_VALUES + _Q4_K_S),
    Quantization.Q4_K_M: ("q4_k", _SMALL + _MORE_BITS + _SHARED_VALUES),
    Quantization.Q5_0: ("q5_0", _OUTPUT + _EIGHT_EXPERTS + _guarded("q5_1")),
    Quantization.Q5_1: ("q5_1", _OUTPUT + _EIGHT_EXPERTS),
    Quantization.Q5_K_M: ("q5_k", _OUTPUT + _EIGHT_EXPERTS + _MORE_BITS),
    Quantization.Q6_K: ("q6_k", _OUTPUT + _EIGHT_EXPERTS),
    Quantization.Q8_0: ("q8_0", ()),
    Quantization.INT4_SYM: ("int4_sym", _INT4_SYM),
    Quantization.F16: ("f16", ()),
    Quantization.BF16: ("bf16", ()),
    Quantization.F32: ("f32", ()),
}
"""Base format and rules of each quantisation."""


def choose(quantization: Quantization, case: Case, rank: int) -> tuple[str, str, str]:
    """(format, why, fallback reason or "") of one tensor with `rank` dimensions."""
    if rank < 2 or case.role in UNQUANTIZED:
        return "f32", "never quantised", ""
    base, rules = MIXES[quantization]
    rule = next((r for r in rules if r.applies(case)), Rule("base format", base, lambda _: True))
    format, misfit = fitting(rule.format, case.k)
    return format, rule.why, misfit


def fitting(format: str, k: int) -> tuple[str, str]:
    """`format` or what takes its place for rows of k elements, and why ("" if nothing does).

    One of SHORT gives its format with a short last block if k allows that, else what the format
    itself falls back to.
    """
    if format in SHORT:
        format = SHORT[format]
        if k % SHORT_MULTIPLE == 0:
            return format, ""
    stored = _fit(format, k)
    why = f"K = {k} is not a multiple of {BLOCK[format]}, which {format} needs"
    return stored, why if stored != format else ""


def short_block(format: str, k: int) -> int:
    """Elements of the short block that ends a row of k elements; 0 if its last block is whole."""
    return k % BLOCK.get(format, 1) if format in SHORT.values() else 0


def _fit(format: str, k: int) -> str:
    """`format`, or what replaces it for rows of k elements; f16 fits everything."""
    while k % BLOCK[format]:
        format = SMALLER_BLOCK.get(format, "f16")
    return format
