"""Checkpoint -> traced IR in one call."""

from __future__ import annotations

from ...errors import ExitCode, SpikeError
from ..ir import Graph
from .checkpoint import Checkpoint
from .lower import lower
from .trace import Traced, trace

STEPWISE_MAY_DO = ("SPK202", "SPK207")  # untraceable code, and code that looks at sizes


def import_model(
    checkpoint: Checkpoint, *, max_positions: int | None = None, streaming: bool = False
) -> Graph:
    """The model of a checkpoint as a verified graph at level traced; no weight is read.

    Inputs are ``%tokens`` and ``%positions`` i64 [B, S], or [B, 1] if the model's code treats a
    single token in its own way; states are ``layers.{i}.key`` and ``.value`` f32 [B, Hkv, P, D],
    and ``layers.{i}.conv.{n}`` and ``.recurrent.{n}`` of fixed size; the output is logits f32
    [B, S, V]. To see it: ``print(print_graph(import_model(Checkpoint.open(path))))``.

    Args:
        max_positions: longest sequence to be served; the config's maximum if None.
        streaming: refuse with SPK203 or SPK207 what a ragged step could not do.

    Raises: SPK2xx as `trace` and `lower`.
    """
    traced = _traced(checkpoint, max_positions, streaming)
    if streaming and (fixed := [s for s in traced.slots if not s.grows]):
        raise SpikeError(
            "SPK203",
            "lowering",
            f"layer {fixed[0].layer} keeps a {fixed[0].part.partition('.')[0]} state of fixed "
            "size between steps; ragged steps have keys and values only.",
            "Build without --enable-streaming: the functional engine carries such states.",
            ExitCode.UNSUPPORTED,
        )
    return lower(traced, checkpoint.canonical, checkpoint.model_type)


def _traced(checkpoint: Checkpoint, max_positions: int | None, streaming: bool) -> Traced:
    """Traced for steps of any length, else stepwise; the first refusal if neither works."""
    try:
        return trace(checkpoint.meta_model(), max_positions=max_positions)
    except SpikeError as error:
        if streaming or error.code not in STEPWISE_MAY_DO:
            raise
        refusal = error
    try:
        return trace(checkpoint.meta_model(), max_positions=max_positions, stepwise=True)
    except SpikeError as error:
        raise refusal from error
