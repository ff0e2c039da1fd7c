"""A `transformers` model -> aten graph, by torch.export on fake weights.

The traced function is one step: tokens and positions i64 [B, S], and one past per cache slot (f32
[B, Hkv, P, D] for keys and values, of fixed size for convolution and recurrent states), give logits
f32 [B, S, V] and the presents. B, S and P are symbolic.

Much code computes a single token in another way than several (recurrent layers have a scan for a
prompt and an update for a token). One graph cannot do both, so such a model is traced stepwise: S
is 1, and a prompt is fed token by token, which is what the code does for every later token anyway.

Where a model keeps nothing, or nothing that can be traced, a step may recompute: its only state is
the tokens so far, and the model runs without its cache over all of them.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...errors import ExitCode, SpikeError
from .cache_slots import PAST_AXIS, CacheSlot, FunctionalCache, cache_from, slots_of
from .fake_model import make_traceable
from .in_place import replace_plain_writes
from .size_branches import refuse_other_path, refuse_size_branches
from .size_conditions import LONGEST, broken_conditions

BATCH, TOKENS, PAST = 2, 3, 5  # example sizes: distinct, and neither 0 nor 1
PREFIX = "model."  # of parameter and module names inside the traced step


@dataclass(frozen=True)
class Traced:
    """A traced step. Inputs after parameters and buffers: tokens, positions, one past per slot.

    Attributes:
        stepwise: a step is one token.
        longest: tokens of the longest sequence that will occur.
    """

    exported: ExportedProgram
    slots: tuple[CacheSlot, ...]
    stepwise: bool = False
    longest: int | None = None


DIGIT = 256  # tokens are kept as digits to this base, which every float format holds exactly
DIGITS = 3


def digits_of(tokens: Any) -> Any:
    """i64 [B, S] -> f32 [B, 1, S, DIGITS], the smallest place first."""
    places = [tokens // DIGIT**place % DIGIT for place in range(DIGITS)]
    return torch.stack(places, -1).float().unsqueeze(1)


def tokens_of(digits: Any) -> Any:
    """The inverse of `digits_of`."""
    places = digits.squeeze(1).long().unbind(-1)
    return sum(digit * DIGIT**place for place, digit in enumerate(places))


class _WholeStep(torch.nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """One step that runs the model over all tokens so far, without a cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.slots = (CacheSlot(0, "tokens", (1, 0, DIGITS)),)

    def forward(self, tokens: Any, positions: Any, pasts: list[Any]) -> tuple[Any, list[Any]]:
        """Logits [B, S, V] of the new tokens, and all tokens."""
        whole = torch.cat((pasts[0], digits_of(tokens)), PAST_AXIS)
        ids = tokens_of(whole)
        takes = inspect.signature(self.model.forward).parameters
        given = {"input_ids": ids} | ({"use_cache": False} if "use_cache" in takes else {})
        if "position_ids" in takes and not _derives_positions(self.model):
            given["position_ids"] = torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids)
        logits = self.model(**given).logits
        return logits[:, pasts[0].shape[PAST_AXIS] :], [whole]


class _Step(torch.nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """One forward step with the cache as arguments and results."""

    def __init__(self, model: torch.nn.Module, slots: tuple[CacheSlot, ...]) -> None:
        super().__init__()
        self.model = model
        self.slots = slots

    def forward(self, tokens: Any, positions: Any, pasts: list[Any]) -> tuple[Any, list[Any]]:
        """Logits [B, S, V] and the presents, in the order of the slots."""
        # Code that writes into a state of fixed size writes into a copy, which then is the present.
        own = [p if s.grows else p.clone() for s, p in zip(self.slots, pasts, strict=True)]
        cache = cache_from(self.slots, own)
        logits = _forward(self.model, tokens, positions, cache)
        return logits, [cache.layers[s.layer].parts()[s.part] for s in self.slots]


def trace(
    model: torch.nn.Module,
    *,
    max_positions: int | None = None,
    stepwise: bool = False,
    recompute: bool = False,
) -> Traced:
    """Traces a causal language model built on the meta device with eager attention.

    The model is changed (fake weights) and is of no further use.

    Args:
        max_positions: longest sequence to be served; the config's maximum if None.
        stepwise: trace a step of exactly one token.
        recompute: keep the tokens alone, and compute all of them anew in every step.

    Raises: SPK202 if the model's code depends on data, SPK203 if it keeps nothing, SPK204 and
        SPK205 as `make_traceable`, SPK207 if a size cannot stay symbolic, SPK208 if a step changes
        a buffer.
    """
    with torch.no_grad(), quiet_export():
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        make_traceable(model, mode, max_positions)
        step = _WholeStep(model) if recompute else _Step(model, _probe(model, mode))
        step.eval()
        run = partial(_step_of, step, mode)
        refuse_size_branches(type(model).__name__, run, stepwise)
        if recompute:
            refuse_other_path(type(model).__name__, run, TOKENS, (1, 1, 0))
        exported = _export(step, mode, 1 if stepwise else TOKENS, max_positions)
        return Traced(_functional(exported), step.slots, stepwise, max_positions)


def _forward(model: torch.nn.Module, tokens: Any, positions: Any, cache: FunctionalCache) -> Any:
    names = inspect.signature(model.forward).parameters
    # transformers 5.2x renamed the argument
    keyword = next((n for n in ("cache", "cache_params") if n in names), "past_key_values")
    given = {"input_ids": tokens, keyword: cache, "use_cache": True}
    if "position_ids" in names and not _derives_positions(model):
        given["position_ids"] = positions
    return model(**given).logits


def _derives_positions(model: torch.nn.Module) -> bool:
    """Whether positions start beyond 0 by a rule of the model's own (RoBERTa and its kin)."""
    return any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())


def _probe(model: torch.nn.Module, mode: FakeTensorMode) -> tuple[CacheSlot, ...]:
    cache = FunctionalCache()
    with mode:
        tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
        positions = torch.arange(TOKENS).expand(BATCH, TOKENS)
    try:
        with mode:
            _forward(model, tokens, positions, cache)
    except SpikeError:
        raise
    except Exception as error:  # the model's own code: anything may come
        raise _untraceable(model, error) from error
    slots = slots_of(cache)
    if not slots:
        raise SpikeError(
            "SPK203",
            "lowering",
            f"{type(model).__name__} keeps nothing in its cache, so it cannot stream.",
            "Build without --enable-streaming: each step then computes all tokens anew.",
            ExitCode.UNSUPPORTED,
        )
    return slots


def _step_of(
    step: _Step | _WholeStep, mode: FakeTensorMode, batch: int, tokens: int, past: int
) -> None:
    """One step on fake tensors of concrete sizes."""
    try:
        with mode:
            ids = torch.zeros(batch, tokens, dtype=torch.int64)
            positions = torch.arange(past, past + tokens).repeat(batch, 1)
            step(ids, positions, [slot.past(batch, past) for slot in step.slots])
    except SpikeError:
        raise
    except Exception as error:  # the model's own code: anything may come
        raise _untraceable(step.model, error) from error


def _export(
    step: _Step | _WholeStep, mode: FakeTensorMode, tokens: int, max_positions: int | None
) -> ExportedProgram:
    """`tokens` is an example, unless it is 1: then a step has one token.

    torch cannot prove some of the conditions that it meets, though they hold for all sizes. Then
    they are kept as assertions in the graph, and checked here over the sizes that may occur. That
    a size differs from a number may fail for torch's own sake (a slice of everything is no slice);
    then the model's code must take the same path there.
    """
    try:
        try:
            return _exported(step, tokens)
        except Exception as error:
            if "Constraints violated" not in str(error):
                raise
            refusal = error
        exported = _exported(step, tokens, longest=max_positions or LONGEST)
        names = ("B", "P") if tokens == 1 else ("B", "S", "P")
        for condition, sizes in broken_conditions(exported, names, max_positions):
            if not isinstance(condition, sympy.Ne):
                raise refusal
            refuse_other_path(
                type(step.model).__name__, partial(_step_of, step, mode), tokens, sizes
            )
        return exported
    except SpikeError:
        raise
    except Exception as error:  # torch raises many types for what it cannot trace
        raise _untraceable(step.model, error) from error


def _exported(step: _Step | _WholeStep, tokens: int, longest: int | None = None) -> ExportedProgram:
    """With conditions kept as assertions if the longest sequence is given.

    torch takes both S and P to be at least 2, so neither may exceed the longest less 2.
    """
    most = None if longest is None else max(longest - 2, 2 * PAST)
    batch, past = Dim("B", min=1), Dim("P", min=0, max=most)
    pasts = [slot.past(BATCH, PAST) for slot in step.slots]
    past_dims = [{0: batch, PAST_AXIS: past} if s.grows else {0: batch} for s in step.slots]
    step_dims = {0: batch} if tokens == 1 else {0: batch, 1: Dim("S", min=1, max=most)}
    # With symbolic sizes a hit in torch's cache of fake results costs more than the computation:
    # tracing takes 28% less time without it.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        return torch.export.export(
            step,
            (
                torch.zeros(BATCH, tokens, dtype=torch.int64),
                torch.arange(PAST, PAST + tokens).repeat(BATCH, 1),
                pasts,
            ),
            dynamic_shapes=(step_dims, step_dims, past_dims),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=longest is not None,
        )


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """The program without in-place ops; torch does it where it takes more than renaming."""
    if not replace_plain_writes(exported.graph):
        exported = exported.run_decompositions({})
    changed = list(exported.graph_signature.buffers_to_mutate.values())
    changed += list(exported.graph_signature.user_inputs_to_mutate.values())
    if changed:
        raise SpikeError(
            "SPK208",
            "lowering",
            f"a step changes {', '.join(n.removeprefix(PREFIX) for n in changed[:3])} in place.",
            "Only keys and values may change between steps; report it with the model type.",
            ExitCode.UNSUPPORTED,
        )
    return exported


def _untraceable(model: torch.nn.Module, error: Exception) -> SpikeError:
    text = str(error)
    cause = " ".join(text.split())[:400]
    name = type(model).__name__
    if "Constraints violated" in text or "specialized" in text:
        limits = " ".join(line.strip(" -") for line in text.splitlines() if line[:3] == "  -")
        return SpikeError(
            "SPK207",
            "lowering",
            f"the code of {name} works for some batch (B), step (S) or past (P) lengths only: "
            f"{(limits or cause)[:600]}",
            "Such a model needs a change in its modelling code; report it with the model type.",
            ExitCode.UNSUPPORTED,
        )
    return SpikeError(
        "SPK202",
        "lowering",
        f"{name} cannot be traced: {type(error).__name__}: {cause}{_where(error)}",
        "If the line depends on the values of a tensor, the model needs a traceable variant; "
        "otherwise report it with the model type.",
        ExitCode.UNSUPPORTED,
    )


def _where(error: BaseException) -> str:
    """The innermost line of a model's own code in the traceback."""
    place, step = "", error.__traceback__
    while step is not None:
        path = step.tb_frame.f_code.co_filename
        if re.search(r"[\\/]models[\\/].*modeling_", path):
            place = f" (at {path}:{step.tb_lineno})"
        step = step.tb_next
    return place


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keeps the loggers of torch and transformers below errors for a while.

    ``torch.__trace`` is on by default, and slow where anything handles its records.
    """
    names = ("torch", "transformers", "torch.fx", "torch._export", "torch.export", "torch.__trace")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
