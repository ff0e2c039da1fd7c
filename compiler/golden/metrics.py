"""How far one distribution over tokens is from another, position by position, in float64.

Two references: a full matrix of logits (recorded on the fly), and a stored prompt, which keeps the
K likeliest tokens and puts the others in one bucket. Merging outcomes can only lower a divergence
(data-processing inequality), so the stored form gives a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .sets import Float32, Float64, GoldenPrompt, Ids

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Comparison:
    """One sequence, source against engine; N compared positions.

    Attributes:
        name: of the sequence.
        first: position of row 0.
        kl: float64 ``[N]``, KL(source || engine) in nats.
        source_top: int32 ``[N]``, the source's likeliest token.
        engine_top: int32 ``[N]``, the engine's.
        margins: float64 ``[N]``, the source's lead of first over second, nats.
        logit_error: float64 ``[N]``, largest absolute difference of compared logits.
        source_nll: float64 ``[M]``, source's negative log-likelihood of the next tokens.
        engine_nll: float64 ``[M]``, the engine's, same tokens.
        greedy_from: row whose likeliest token is the first greedy one; N when there is none.
    """

    name: str
    first: int
    kl: Float64
    source_top: Ids
    engine_top: Ids
    margins: Float64
    logit_error: Float64
    source_nll: Float64
    engine_nll: Float64
    greedy_from: int

    @property
    def agrees(self) -> Bools:
        """Bool ``[N]``: both put the same token first."""
        return np.asarray(self.source_top == self.engine_top)


def log_sum_exp(logits: Float64) -> Float64:
    """Float64 ``[N, V]`` to ``[N]``; a row of -inf gives -inf."""
    top = logits.max(axis=-1, keepdims=True)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(logits - safe).sum(axis=-1)) + safe[:, 0])


def split_log_sum_exp(logits: Float32, top_ids: Ids) -> Float64:
    """Float64 ``[N, 2]``: log-sum-exp of all logits ``[N, V]``, and of those outside `top_ids`."""
    wide = logits.astype(np.float64)
    total = log_sum_exp(wide)
    np.put_along_axis(wide, top_ids.astype(np.int64), -np.inf, axis=-1)
    return np.stack([total, log_sum_exp(wide)], axis=-1)


def kl_of(source: Float64, engine: Float64) -> Float64:
    """KL(source || engine) in nats of log-probabilities ``[N, C]``; impossible outcomes count 0."""
    possible = np.isfinite(source)
    safe = np.where(possible, source, 0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = np.where(possible, np.exp(safe) * (safe - engine), 0.0)
    # Rounding can leave a sum a few ulp below zero; a divergence is never negative.
    return np.asarray(np.maximum(terms.sum(axis=-1), 0.0))


def compare_stored(prompt: GoldenPrompt, probe_ids: Ids, logits: Float32) -> Comparison:
    """Compare a stored prompt with an engine's logits float32 ``[T, V]`` for its whole sequence."""
    rows = logits[prompt.first :]
    top_ids = prompt.top_ids.astype(np.int64)
    lse = split_log_sum_exp(rows, prompt.top_ids)
    engine_kept = np.take_along_axis(rows, top_ids, axis=-1).astype(np.float64)
    source_kept = prompt.top_logits.astype(np.float64)
    source = np.concatenate([source_kept, prompt.lse[:, 1:]], axis=-1) - prompt.lse[:, :1]
    engine = np.concatenate([engine_kept, lse[:, 1:]], axis=-1) - lse[:, :1]
    probe_error = np.abs(rows[:, probe_ids].astype(np.float64) - prompt.probe_logits)
    error = np.concatenate([np.abs(engine_kept - source_kept), probe_error], axis=-1)
    following = np.asarray(prompt.sequence[prompt.first + 1 :], dtype=np.int64)
    engine_next = rows[np.arange(following.size), following].astype(np.float64)
    return Comparison(
        name=prompt.name,
        first=prompt.first,
        kl=kl_of(source, engine),
        source_top=prompt.top_ids[:, 0],
        engine_top=rows.argmax(axis=-1).astype(np.int32),
        margins=prompt.margins.astype(np.float64),
        logit_error=error.max(axis=-1),
        source_nll=prompt.lse[:-1, 0] - prompt.next_logits,
        engine_nll=lse[:-1, 0] - engine_next,
        greedy_from=len(prompt.tokens) - 1 - prompt.first,
    )


# Rows at a time: five float64 matrices of a 262,144-token vocabulary stay under 350 MB.
ROWS = 32


@dataclass(frozen=True)
class RowMetrics:
    """Per row of two matrices of logits; N rows.

    Attributes:
        kl: float64 ``[N]``, KL(source || engine), nats.
        margins: float64 ``[N]``, the source's lead of first over second, nats.
        logit_error: float64 ``[N]``, largest absolute difference.
        source_lse, engine_lse: float64 ``[N]``, log-sum-exp of each side.
    """

    kl: Float64
    margins: Float64
    logit_error: Float64
    source_lse: Float64
    engine_lse: Float64


def row_metrics(source: Float32, engine: Float32) -> RowMetrics:
    """Compare logits float32 ``[N, V]`` row by row, a few rows at a time."""
    columns: list[list[Float64]] = [[], [], [], [], []]
    for start in range(0, len(source), ROWS):
        wide = source[start : start + ROWS].astype(np.float64)
        ours = engine[start : start + ROWS].astype(np.float64)
        source_lse, engine_lse = log_sum_exp(wide), log_sum_exp(ours)
        pair = np.partition(wide, -2, axis=-1)[:, -2:]
        parts = (
            kl_of(wide - source_lse[:, None], ours - engine_lse[:, None]),
            pair[:, 1] - pair[:, 0],
            np.abs(wide - ours).max(axis=-1),
            source_lse,
            engine_lse,
        )
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    return RowMetrics(*(np.concatenate(column) for column in columns))


def compare_full(
    name: str, tokens: list[int], source: Float32, engine: Float32, prompt_length: int | None = None
) -> Comparison:
    """Compare two full matrices of logits float32 ``[T, V]`` of the same tokens.

    Args:
        name: for reports.
        tokens: the T ids.
        source: reference logits.
        engine: logits under test.
        prompt_length: where the source's greedy continuation begins; None if there is none.
    """
    rows = row_metrics(source, engine)
    following = np.asarray(tokens[1:], dtype=np.int64)
    index = np.arange(following.size)
    return Comparison(
        name=name,
        first=0,
        kl=rows.kl,
        source_top=source.argmax(axis=-1).astype(np.int32),
        engine_top=engine.argmax(axis=-1).astype(np.int32),
        margins=rows.margins,
        logit_error=rows.logit_error,
        source_nll=rows.source_lse[:-1] - source[index, following],
        engine_nll=rows.engine_lse[:-1] - engine[index, following],
        greedy_from=len(tokens) if prompt_length is None else prompt_length - 1,
    )
