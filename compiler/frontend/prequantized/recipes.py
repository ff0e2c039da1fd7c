"""Parameters made of several packed weights, before they are multiplied out.

A conversion rule that stacks experts or joins matrices by rows does the same to codes, scales and
zero points, so it is run on each of them. A rule that touches the columns changes their shapes in
different ways, which shows; such a parameter has no integers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..weight_files import WeightFiles
from ..weight_recipe import Recipe
from .files import UnpackedFiles
from .integers import Integers
from .precision import Precision


def recipe_integers(
    recipe: Recipe, target: str, files: WeightFiles, model: torch.nn.Module
) -> Integers | None:
    """The parameter `target` as integers; None if a part isn't packed or columns are reordered."""
    if not isinstance(files, UnpackedFiles):
        return None
    parts = {name: files.integers(name) for name in recipe.names()}
    found = {name: part for name, part in parts.items() if part is not None}
    first = next(iter(found.values()), None)
    if first is None or len(found) < len(parts):
        return None
    if recipe.converter is None:
        return first
    same = (first.bits, first.columns)
    if any(
        p.inputs_first or p.groups is not None or (p.bits, p.columns) != same
        for p in found.values()
    ):
        return None

    def run(of: Callable[[Integers], torch.Tensor]) -> torch.Tensor:
        return recipe.run(lambda name: of(found[name]), model)[target]

    try:
        scales = run(lambda part: part.scales.float())
        zeros = run(lambda part: part.zeros)
    except (RuntimeError, ValueError, IndexError):  # transformers' operations, on other shapes
        return None
    if scales.shape != zeros.shape:
        return None
    return Integers(
        first.bits, first.columns, scales, zeros, lambda: run(lambda part: part.codes())
    )


def recipe_precision(recipe: Recipe, files: WeightFiles) -> Precision | None:
    """What the parameter's values need of a float; None unless all of it is packed."""
    if not isinstance(files, UnpackedFiles):
        return None
    parts = [files.precision(name) for name in recipe.names()]
    found = [part for part in parts if part is not None]
    return Precision.worst(found) if found and len(found) == len(parts) else None
