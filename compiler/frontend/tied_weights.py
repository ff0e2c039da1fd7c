"""Which parameters share one stored tensor: decided by the tensors, not by the flag alone.

The model class lists what *may* be tied, config.json says whether it *should* be, the checkpoint
decides. As in transformers' `tie_weights` while loading:

    stored             config says tied                     config says untied
    both, equal        one tensor                           one tensor (same values, half the bytes)
    both, different    two tensors, with a note             two tensors
    one of them        the other takes its values           the other is missing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .weight_files import WeightFiles
from .weight_recipe import Recipe


@dataclass(frozen=True)
class Ties:
    """Attributes as in `WeightPlan`; a parameter without an entry in `stored_as` is missing."""

    stored_as: Mapping[str, str]
    untied: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def resolve_ties(
    model: torch.nn.Module,
    expected: Mapping[str, torch.Tensor],
    recipes: Mapping[str, Recipe],
    files: WeightFiles,
) -> Ties:
    """Decide for every expected parameter which stored parameter gives its values."""
    stored_as = {name: name for name in expected if name in recipes}
    wanted: dict[str, str] = dict(model.all_tied_weights_keys)
    untied, notes = [], []
    for source, targets in _by_source(wanted).items():
        members = [source, *targets]
        keeper = next((name for name in members if name in stored_as), None)
        if keeper is None:
            continue
        for name in members:
            if name not in stored_as or _equal(model, files, recipes, keeper, name):
                stored_as[name] = keeper
            else:
                untied.append((name, keeper))
                notes.append(
                    f"config.json says that {name} is tied to {keeper}, but both are stored with "
                    "different values: both are used as stored, as transformers does"
                )
    for name, keeper in _may_be_tied(model, expected).items():
        both_stored = name not in wanted and name in stored_as and keeper in stored_as
        if both_stored and _equal(model, files, recipes, keeper, name):
            stored_as[name] = keeper
    return Ties(stored_as, tuple(untied), tuple(notes))


def _by_source(tied: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for target, source in tied.items():
        groups.setdefault(source, []).append(target)
    return groups


def _may_be_tied(model: torch.nn.Module, expected: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The class's own tie list, whatever the flag says; patterns (rare) are left out."""
    listed: Mapping[str, str] = model._tied_weights_keys or {}
    return {name: of for name, of in listed.items() if name in expected and of in expected}


def _equal(
    model: torch.nn.Module,
    files: WeightFiles,
    recipes: Mapping[str, Recipe],
    left: str,
    right: str,
) -> bool:
    """Whether two stored parameters have the same dtype, shape and values."""
    if left == right:
        return True
    first, second = recipes[left], recipes[right]
    if first.converter is None and second.converter is None:
        return files.equal(first.names()[0], second.names()[0])
    a, b = first.run(files.tensor, model)[left], second.run(files.tensor, model)[right]
    return bool(a.dtype == b.dtype and torch.equal(a, b))
