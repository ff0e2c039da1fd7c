"""Checks of the stored tensors against the model: dtypes, completeness, shapes.

Each raises one `SpikeError` that names the first tensors concerned and says how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ...errors import SpikeError
from .prequantized import quantised_source
from .safetensors_file import TORCH_DTYPES
from .tied_weights import Ties
from .weight_files import WeightFiles
from .weight_recipe import Recipe

LOADABLE = (torch.float32, torch.float16, torch.bfloat16)
# What quantisers store beside, or instead of, a `weight`.
QUANTISED_SUFFIXES = (
    *(".qweight", ".qzeros", ".scales", ".g_idx", ".SCB", ".absmax", ".weight_packed"),
    *(".weight_scale", ".weight_scale_inv", ".weight_zero_point", "_blocks", "_scales"),
)


def refuse_unloadable(
    files: WeightFiles,
    recipes: Mapping[str, Recipe],
    unused: Iterable[str],
    expected: Mapping[str, torch.Tensor],
    directory: Path,
) -> None:
    """Only bf16, f16 and f32 weights are read in this version.

    Raises: SPK120 for quantised weights (by dtype or name), SPK121 for other dtypes.
    """
    for name in unused:
        if name.endswith(QUANTISED_SUFFIXES):
            raise quantised_source(directory, f"it stores {name}")
    for target, recipe in recipes.items():
        for name in recipe.names():
            stored = files.entry(name).dtype
            dtype = TORCH_DTYPES.get(stored)
            if expected[target].is_floating_point():
                if dtype in LOADABLE:
                    continue
                if stored != "F64":
                    raise quantised_source(directory, f"{name} is stored as {stored}")
            elif dtype is not None and not dtype.is_floating_point:
                continue
            raise SpikeError(
                "SPK121",
                "checkpoint",
                f"{name} in {files.home[name]} is stored as {stored}; reading that dtype is not "
                "in this version (BF16, F16 and F32 are).",
                "Load the model with transformers as bfloat16 or float32 and save it again.",
            )


def require_complete(
    model: torch.nn.Module,
    expected: Mapping[str, torch.Tensor],
    ties: Ties,
    unused: list[str],
    directory: Path,
) -> None:
    """Every parameter must be stored, under its own name or a tied one.

    Raises: SPK111 if only the output head is missing, SPK110 otherwise.
    """
    missing = [name for name in expected if name not in ties.stored_as]
    if not missing:
        return
    output = model.get_output_embeddings()
    head = {name for name, module in model.named_modules() if module is output}
    if output is not None and all(name.rpartition(".")[0] in head for name in missing):
        raise _missing_head(missing[0], expected[missing[0]], directory)
    extra = f" {len(unused)} stored tensors fit nowhere, first: {unused[0]}." if unused else ""
    raise SpikeError(
        "SPK110",
        "checkpoint",
        f"{len(missing)} of the model's {len(expected)} parameters are missing from {directory}, "
        f"first: {', '.join(missing[:3])}.{extra}",
        "Check that config.json belongs to these weights (`model_type`, number of layers, "
        "biases), or download the checkpoint again.",
    )


def _missing_head(name: str, tensor: torch.Tensor, directory: Path) -> SpikeError:
    return SpikeError(
        "SPK111",
        "checkpoint",
        f"the output head {name} {list(tensor.shape)} is missing from {directory}, and its "
        "config.json says that it isn't tied to the embeddings (transformers would fill it with "
        "random numbers).",
        'If the model shares them, set "tie_word_embeddings": true in config.json; otherwise '
        "download a checkpoint of the whole *ForCausalLM model.",
    )


def require_shapes(
    made: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    recipes: Mapping[str, Recipe],
    files: WeightFiles,
    directory: Path,
) -> None:
    """Every parameter must have the shape that config.json asks for. Raises: SPK109."""
    wrong = [
        name
        for name, tensor in made.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    if not wrong:
        return
    name = wrong[0]
    sources = recipes[name].names()
    origin = f"from {sources[0]} in {files.home[sources[0]]}"
    if len(sources) > 1:
        origin = f"made from {len(sources)} tensors, first: {sources[0]}"
    more = f" {len(wrong)} parameters differ." if len(wrong) > 1 else ""
    raise SpikeError(
        "SPK109",
        "checkpoint",
        f"{name} ({origin}) has shape {list(made[name].shape)}, but config.json in {directory} "
        f"asks for {list(expected[name].shape)}.{more}",
        "The weights and config.json belong to different models: get them together again.",
    )
