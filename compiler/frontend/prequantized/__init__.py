"""Checkpoints that another tool has quantised: each weight taken exactly, or the source refused.

methods.py      config.json -> the scheme, or a refusal by name
settings.py     its settings, checked
packed.py       what a scheme and one packed weight are
integers.py     integers on a grid of scales and zero points
gptq.py  awq.py  compressed.py  fp8.py     the schemes
precision.py    which float holds a packed weight's values exactly
recipes.py      parameters that are made of several packed weights (stacked experts)
files.py        the weight files as if every packed weight were stored plainly

A packed weight (`qweight`, `scales`, ... or `weight_packed`, ...) appears as one tensor `weight` of
float32, so everything behind (names, experts, ties, shapes) is as for plain checkpoints.
"""

from __future__ import annotations

from .files import UnpackedFiles, unpack
from .integers import Integers
from .methods import quantised_source, read_scheme
from .packed import Packed, Scheme
from .precision import Precision
from .recipes import recipe_integers, recipe_precision

__all__ = [
    "Integers",
    "Packed",
    "Precision",
    "Scheme",
    "UnpackedFiles",
    "quantised_source",
    "read_scheme",
    "recipe_integers",
    "recipe_precision",
    "unpack",
]
