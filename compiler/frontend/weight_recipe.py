"""How parameters of the model are made from stored tensors: one rule and its operands."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.core_model_loading import WeightConverter


@dataclass
class Recipe:
    """How one or more parameters are made from stored tensors.

    Attributes:
        target: the parameter that names the recipe (the first one, if it makes several).
        converter: the conversion rule; None if the tensor is taken as it is.
        sources: rule pattern -> stored tensor names, in the order of the rule.
    """

    target: str
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """All stored tensors that it reads."""
        return [name for names in self.sources.values() for name in names]

    def run(
        self, tensor: Callable[[str], torch.Tensor], model: torch.nn.Module
    ) -> dict[str, torch.Tensor]:
        """Make the parameters from `tensor(stored name)`; `model` is on the meta device."""
        if self.converter is None:
            return {self.target: tensor(self.names()[0])}
        rule = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                rule.add_tensor(self.target, name, pattern, tensor(name))
        made: Mapping[str, Any] = rule.convert(self.target, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }
