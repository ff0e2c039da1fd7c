"""The order of the passes, on one screen, in named phases.

Recipes set options of passes and leave passes out; they never reorder. Every pass is found by its
name; `configure` checks names, option names and option types before anything runs.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace

from ..errors import SpikeError
from .alias_kv import AliasKv
from .assign_kernels import AssignKernels
from .assign_precision import AssignPrecision
from .assign_roles import AssignRoles
from .assign_storage import AssignStorage
from .base import Pass
from .clean_up import CleanUp
from .flatten_tokens import FlattenTokens
from .fold_norm_offset import FoldNormOffset
from .fuse_qkv import FuseQkv
from .fuse_residual import FuseResidual
from .manager import Phase
from .raise_activation import RaiseActivation
from .raise_attention import RaiseAttention
from .raise_gated_mlp import RaiseGatedMlp
from .raise_layer_norm import RaiseLayerNorm
from .raise_linear import RaiseLinear
from .raise_moe import RaiseMoe
from .raise_rms_norm import RaiseRmsNorm
from .raise_rope import RaiseRope
from .raise_route import RaiseRoute
from .select_logit_rows import SelectLogitRows


def default_pipeline() -> tuple[Phase, ...]:
    """Every pass with its default options."""
    return (
        Phase("clean", (CleanUp(),)),
        Phase(
            "raise",
            (
                RaiseLinear(),
                RaiseActivation(),
                RaiseRmsNorm(),
                RaiseLayerNorm(),  # a layer norm is an RMS norm of x - mean(x)
                CleanUp(),  # transposes sink below the norms, next to the rotations
                RaiseRope(),
                CleanUp(),
                RaiseAttention(),
                RaiseGatedMlp(),
                RaiseMoe(),
                RaiseRoute(),
                CleanUp(),
            ),
        ),
        Phase("state", (AliasKv(),)),
        Phase("ragged", (FlattenTokens(), CleanUp(), SelectLogitRows())),
        Phase("fuse", (FoldNormOffset(), FuseResidual())),
        Phase(
            "place",
            (
                AssignRoles(),
                FuseQkv(),
                AssignStorage(),
                AssignPrecision(),
                AssignKernels(),
            ),
        ),
    )


def configure(
    phases: Sequence[Phase],
    *,
    without: Collection[str] = (),
    options: Mapping[str, Mapping[str, object]] | None = None,
) -> tuple[Phase, ...]:
    """The pipeline with some passes left out and some options set, by pass name.

    Raises SpikeError with the nearest name: SPK301 unknown pass, SPK302 unknown option, SPK303 an
    option of the wrong type.
    """
    known = {step.name for phase in phases for step in phase.passes}
    chosen = dict(options or {})
    for name in (*without, *chosen):
        if name not in known:
            raise _unknown("SPK301", f"There is no pass {name!r}.", name, known)
    return tuple(
        Phase(
            phase.name,
            tuple(
                with_options(step, chosen.get(step.name, {}))
                for step in phase.passes
                if step.name not in without
            ),
        )
        for phase in phases
    )


def with_options(step: Pass, options: Mapping[str, object]) -> Pass:
    """The pass with some options set; SPK302 or SPK303 if one does not fit."""
    defaults = {f.name: getattr(step, f.name) for f in fields(step)}
    for name, value in options.items():
        if name not in defaults:
            what = f"The pass {step.name} has no option {name!r}."
            raise _unknown("SPK302", what, name, defaults)
        wanted = type(defaults[name])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise SpikeError(
                "SPK303",
                "passes",
                f"{step.name}.{name} is {value!r}, but it must be of type {wanted.__name__}.",
                f"Set it as {name}: {defaults[name]} (the default), for example.",
            )
    return replace(step, **options)


def _unknown(code: str, what: str, name: str, known: Iterable[str]) -> SpikeError:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names) or 'none'}."
    return SpikeError(code, "passes", what, hint)
