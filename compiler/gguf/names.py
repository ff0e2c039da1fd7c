"""What llama.cpp calls the parameters of a transformers model.

The names are the `gguf` package's own table (TensorNameMap); files of importance matrices, GGUF
sources and exports all go through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gguf.constants import MODEL_ARCH_NAMES, LlamaFileType
from gguf.tensor_mapping import TensorNameMap

from .reader import Value

ARCHITECTURES = {
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "mistral": "llama",
    "mixtral": "llama",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""transformers' model type -> `general.architecture`, where they differ."""

STACKED_GATE_UP = ".experts.gate_up_proj"


def architecture(model_type: str) -> str | None:
    """`general.architecture` for a model type; None if the `gguf` package has none."""
    name = ARCHITECTURES.get(model_type, model_type)
    return name if name in MODEL_ARCH_NAMES.values() else None


def tensor_names(
    model_type: str, layers: int, parameters: Iterable[str]
) -> Mapping[str, tuple[str, ...]]:
    """Parameter -> names of the GGUF tensors that make it, one above the other.

    Mostly one: ``model.layers.0.self_attn.q_proj.weight`` -> ``("blk.0.attn_q.weight",)``. Gate and
    up of stacked experts are one parameter in transformers and two tensors in GGUF. Parameters that
    llama.cpp has no name for are left out.

    Args:
        model_type: transformers' model type.
        layers: number of decoder layers.
        parameters: names in the model's state dict.
    """
    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    arch = architecture(model_type)
    if arch is None:
        return {}
    table = TensorNameMap(numbers[arch], layers)
    found = {name: _names(name, table) for name in parameters}
    return {name: names for name, names in found.items() if names}


def file_type_name(metadata: Mapping[str, Value]) -> str:
    """`general.file_type` as people write it (``q4_k_m``); empty if the file doesn't say."""
    number = metadata.get("general.file_type")
    known = {int(kind): kind.name.lower() for kind in LlamaFileType}
    return known.get(number, "").removeprefix("mostly_") if isinstance(number, int) else ""


def file_type(name: str) -> int | None:
    """The number of a mix, if llama.cpp has one of that name."""
    known = {kind.name.lower().removeprefix("mostly_").removeprefix("all_"): int(kind)
             for kind in LlamaFileType}  # fmt: skip
    return known.get(name)


def _names(parameter: str, table: TensorNameMap) -> tuple[str, ...]:
    if parameter.endswith(STACKED_GATE_UP):
        down = table.get_name(parameter.replace("gate_up_proj", "down_proj"))
        if down is None:
            return ()
        return tuple(f"{down.replace('down', part)}.weight" for part in ("gate", "up"))
    stem, dot, suffix = parameter.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, dot, suffix = parameter, ".", "weight"
    name = table.get_name(stem)
    return () if name is None else (f"{name}{dot}{suffix}",)
