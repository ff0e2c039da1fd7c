"""Stored tensor names -> parameter names of the model, by the model class's own rules.

`transformers` renames, stacks and splits stored tensors while loading (experts, fused projections,
`embed_out`, a missing or extra base-model prefix). The same rules are applied here to *names* and
to meta tensors, so that every shape is checked before a byte of data is read; `load` then runs the
rule of one parameter on mapped tensors.

Source of the procedure: `convert_and_load_state_dict_in_model` in transformers'
`core_model_loading.py`, and `PreTrainedModel.tie_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ...errors import SpikeError
from .checkpoint_checks import refuse_unloadable, require_complete, require_shapes
from .safetensors_file import TORCH_DTYPES
from .tied_weights import resolve_ties
from .weight_files import WeightFiles
from .weight_recipe import Recipe


@dataclass(frozen=True)
class TensorInfo:
    """Shape and stored dtype of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class WeightPlan:
    """Every parameter of the model and where it comes from.

    Attributes:
        parameters: parameter name -> shape and stored dtype; tied names included.
        recipes: parameter name -> recipe, for parameters that are stored.
        stored_as: parameter name -> the stored parameter that gives its values.
        untied: pairs in the model's tie list whose stored values differ.
        unused: stored tensors that no parameter takes.
        notes: what a user may want to know.
    """

    parameters: Mapping[str, TensorInfo]
    recipes: Mapping[str, Recipe]
    stored_as: Mapping[str, str]
    untied: tuple[tuple[str, str], ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]


def plan_weights(files: WeightFiles, model: torch.nn.Module, directory: Path) -> WeightPlan:
    """Assign stored tensors to the parameters of `model` (meta device) and check them.

    Raises: SPK109-111, SPK120, SPK121, SPK124, SPK125 (see `checkpoint.py`).
    """
    expected: dict[str, torch.Tensor] = model.state_dict()
    recipes, unused = _collect(files, model, expected)
    refuse_unloadable(files, recipes, unused, expected, directory)
    notes = _drop_duplicates(files, recipes, directory)
    made, recipe_of = _make_on_meta(files, recipes, model, directory)
    ties = resolve_ties(model, expected, recipe_of, files)
    require_complete(model, expected, ties, unused, directory)
    require_shapes(made, expected, recipe_of, files, directory)
    parameters = {name: _info(made[ties.stored_as[name]]) for name in expected}
    notes += [*ties.notes, *_unused_note(model, unused)]
    return WeightPlan(
        parameters, recipe_of, ties.stored_as, ties.untied, tuple(unused), tuple(notes)
    )


def _info(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(tensor.shape), tensor.dtype)


def _collect(
    files: WeightFiles, model: torch.nn.Module, expected: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Recipe], list[str]]:
    """Recipes by first target, and the stored tensors that nothing takes."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    recipes: dict[str, Recipe] = {}
    unused: list[str] = []
    # Natural order decides the order of stacked experts, and which rename guards are active.
    for name in sorted(files.home, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], prefix, expected)
        if target not in expected:
            unused.append(name)
            continue
        rule = by_pattern[pattern] if pattern is not None else None
        recipe = recipes.setdefault(target, Recipe(target, rule))
        recipe.sources.setdefault(name if pattern is None else pattern, []).append(name)
    return recipes, unused


def _drop_duplicates(
    files: WeightFiles, recipes: Mapping[str, Recipe], directory: Path
) -> list[str]:
    """Several stored tensors for one parameter: fine if equal, refused if they differ."""
    notes = []
    for target, recipe in recipes.items():
        stray = [p for p in recipe.sources if p in files.home]  # taken as it is: pattern == name
        if not stray or (recipe.converter is None and len(recipe.sources) == 1):
            continue
        first, *others = recipe.names()
        if recipe.converter is not None or not all(files.equal(first, name) for name in others):
            raise SpikeError(
                "SPK125",
                "checkpoint",
                f"{directory} stores {target} more than once, with different values: "
                f"{', '.join(recipe.names()[:3])}.",
                "Remove the wrong one, or download the checkpoint again.",
            )
        recipe.sources = {first: [first]}
        notes.append(f"{target} is stored {len(others) + 1} times with equal values")
    return notes


def _make_on_meta(
    files: WeightFiles, recipes: Mapping[str, Recipe], model: torch.nn.Module, directory: Path
) -> tuple[dict[str, torch.Tensor], dict[str, Recipe]]:
    """Run every recipe on meta tensors: shapes and dtypes of all parameters, no data read."""

    def blank(name: str) -> torch.Tensor:
        entry = files.entry(name)
        return torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta")

    made: dict[str, torch.Tensor] = {}
    recipe_of: dict[str, Recipe] = {}
    for target, recipe in recipes.items():
        try:
            result = recipe.run(blank, model)
        except Exception as error:  # transformers' operations on a user's shapes
            raise SpikeError(
                "SPK124",
                "checkpoint",
                f"{target} can't be made from its {len(recipe.names())} stored tensors in "
                f"{directory} (first: {recipe.names()[0]}): {error}.",
                "Some are missing or have wrong shapes: download the checkpoint again.",
            ) from error
        made |= result
        recipe_of |= dict.fromkeys(result, recipe)
    return made, recipe_of


def _unused_note(model: torch.nn.Module, unused: list[str]) -> Iterable[str]:
    """A note about unused tensors, except for those that the model class itself calls harmless."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    patterns |= {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    harmless = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    rest = [name for name in unused if not harmless.search(name)]
    if rest:
        yield f"stored tensors that the model doesn't have: {len(rest)}, first: {rest[0]}"
