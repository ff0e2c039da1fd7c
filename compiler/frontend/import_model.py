"""Checkpoint -> traced IR in one call."""

from __future__ import annotations

from ..ir import Graph
from .checkpoint import Checkpoint
from .lower import lower
from .trace import trace


def import_model(checkpoint: Checkpoint, *, max_positions: int | None = None) -> Graph:
    """The model of a checkpoint as a verified graph at level traced; no weight is read.

    Inputs are ``%tokens`` and ``%positions`` i64 [B, S]; states are ``layers.{i}.key`` and
    ``.value`` f32 [B, Hkv, P, D]; the output is logits f32 [B, S, V]. To see it:
    ``print(print_graph(import_model(Checkpoint.open(path))))``.

    Args:
        max_positions: longest sequence to be served; the config's maximum if None.

    Raises: SPK2xx as `trace` and `lower`.
    """
    traced = trace(checkpoint.meta_model(), max_positions=max_positions)
    return lower(traced, checkpoint.canonical, checkpoint.model_type)
