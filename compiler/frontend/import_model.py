"""Checkpoint -> traced IR in one call."""

from __future__ import annotations

from ...errors import ExitCode, SpikeError
from ..ir import Graph
from .checkpoint import Checkpoint
from .lower import lower
from .trace import Traced, trace

STEPWISE_MAY_DO = ("SPK202", "SPK207")  # untraceable code, and code that looks at sizes
RECOMPUTING_MAY_DO = (*STEPWISE_MAY_DO, "SPK203", "SPK208")  # code that keeps nothing, or elsewhere


def import_model(
    checkpoint: Checkpoint, *, max_positions: int | None = None, streaming: bool = False
) -> Graph:
    """The model of a checkpoint as a verified graph at level traced; no weight is read.

    Inputs are ``%tokens`` and ``%positions`` i64 [B, S], or [B, 1] if the model's code treats a
    single token in its own way; states are ``layers.{i}.key`` and ``.value`` f32 [B, Hkv, P, D],
    and ``layers.{i}.conv.{n}`` and ``.recurrent.{n}`` of fixed size; the output is logits f32
    [B, S, V]. What can be traced without its cache only has one state, ``layers.0.tokens``: the
    tokens so far, which every step computes anew. To see it:
    ``print(print_graph(import_model(Checkpoint.open(path))))``.

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
    """Traced for steps of any length, else stepwise, else recomputing; else the first refusal."""
    refusal: SpikeError | None = None
    for way in ({}, {"stepwise": True}, {"recompute": True}):
        if refusal is not None and "stepwise" in way and refusal.code not in STEPWISE_MAY_DO:
            continue
        try:
            return trace(checkpoint.meta_model(), max_positions=max_positions, **way)
        except SpikeError as error:
            refusal, error.__context__ = refusal or error, refusal
            if streaming or refusal.code not in RECOMPUTING_MAY_DO:
                break
    assert refusal is not None
    raise refusal
