"""One model type: a small random checkpoint, an engine of it, and both their logits."""

from __future__ import annotations

import hashlib
import inspect
import shutil
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from numpy.typing import NDArray
from shrunk_configs import VOCAB, small_config
from spikeinfer import SpikeEngine, SpikeError
from spikeinfer.driver import BuildRequest, build
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

PROMPT, STEPS = 24, 8
TOLERANCE = 1e-3  # order of sums in float32; absolute up to logits of 10, relative above
FIRST_TOKEN, LAST_TOKEN = 5, VOCAB - 10  # neither special nor a placeholder of images
CANNOT_STREAM = ("SPK202", "SPK203", "SPK207", "SPK306")
NOTE = 300  # characters of a reason


@dataclass(frozen=True)
class Outcome:
    """What became of a type.

    Args:
        status: matches, differs, fails or ``not runnable`` (by transformers itself).
        abi: streaming, functional, stepwise or recomputing; empty if no engine was built.
        prefill, decode: largest difference of a logit.
        reason: why not; for a match, what is worth a note.
    """

    status: str
    abi: str = ""
    prefill: float | None = None
    decode: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Reference:
    """transformers' float32 logits, ``[tokens, vocab]`` each.

    Args:
        prefill: of the prompt.
        whole: of the tokens after it, computed together with the prompt.
        stepwise: the same with transformers' own cache, token by token.
    """

    prefill: NDArray[np.float32]
    whole: NDArray[np.float32]
    stepwise: NDArray[np.float32] | None


def examine(model_type: str, cache: Path) -> Outcome:
    """The whole comparison. `cache` keeps the checkpoints."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        source = checkpoint(model_type, cache)
        ids = _tokens()
        theirs = _reference(source, ids)
    except Exception as error:
        return Outcome("not runnable", reason=_sentence(error))
    with tempfile.TemporaryDirectory(prefix="spike-architectures-") as scratch:
        try:
            abi, why = _built(source, Path(scratch) / "engine")
            ours = _engine_logits(Path(scratch) / "engine", ids)
        except Exception as error:
            return Outcome("fails", reason=_sentence(error))
    return _compared(abi, why, ours, theirs)


def checkpoint(model_type: str, cache: Path) -> Path:
    """The small model's checkpoint directory, made unless it is there."""
    config = small_config(model_type)
    recipe = f"{transformers.__version__} {config.to_json_string(use_diff=False)}"
    key = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    directory = cache / "models" / f"{model_type}-{key}"
    if not directory.is_dir():
        for stale in directory.parent.glob(f"{model_type}-{'?' * 8}"):
            shutil.rmtree(stale)
        made = directory.with_suffix(".new")
        shutil.rmtree(made, ignore_errors=True)
        _random_model(config).save_pretrained(made)
        made.rename(directory)
    return directory


def _random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Weights around the model's own initialisation, wide enough that attention isn't uniform."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1 and "conv" not in name and not name.endswith("A_log"):
                parameter.copy_(0.15 * torch.randn_like(parameter))
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def _tokens() -> list[int]:
    rng = np.random.default_rng(0)
    return [int(i) for i in rng.integers(FIRST_TOKEN, LAST_TOKEN, PROMPT + STEPS)]


def _reference(source: Path, ids: list[int]) -> Reference:
    """transformers' logits of the prompt, and of the steps after it in two ways."""
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        prefill = model(input_ids=torch.tensor([ids[:PROMPT]]), use_cache=True)
        whole = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
        logits = prefill.logits[0].float().numpy()
        stepwise = _decode(model, prefill, ids)
    if whole.shape[0] != len(ids) or not np.isfinite(whole).all():
        raise ValueError(f"its logits are of shape {whole.shape}, or not finite")
    return Reference(logits, whole[PROMPT:], stepwise)


def _decode(model: PreTrainedModel, prefill: Any, ids: list[int]) -> NDArray[np.float32] | None:
    """The steps with the model's own cache; None if it keeps none or cannot go on from it."""
    held = (getattr(prefill, n, None) for n in ("past_key_values", "cache_params", "cache"))
    cache = next((c for c in held if c is not None), None)
    takes = inspect.signature(model.forward).parameters
    name = next((n for n in ("cache", "cache_params", "past_key_values") if n in takes), None)
    if cache is None or name is None:
        return None
    rows = []
    try:
        for token in ids[PROMPT:]:
            step = model(input_ids=torch.tensor([[token]]), use_cache=True, **{name: cache})
            rows.append(step.logits[0, -1].float().numpy())
    except Exception:  # the model's own code; the whole sequence remains as reference
        return None
    return np.stack(rows)


def _built(source: Path, output: Path) -> tuple[str, str]:
    """Builds the engine; its interface, and why it cannot stream."""
    why = ""
    for streaming in (True, False):
        try:
            build(
                BuildRequest(
                    source, output, dtype="float32", enable_streaming=streaming, golden="off"
                )
            )
            return ("streaming" if streaming else _functional_kind(output)), why
        except SpikeError as error:
            if not streaming or error.code not in CANNOT_STREAM:
                raise
            why = _sentence(error)
    raise AssertionError("unreachable")


def _functional_kind(engine: Path) -> str:
    """``recomputing`` if tokens are all that is kept, ``stepwise`` if a run takes one token."""
    graph = onnx.load(engine / "rank0.engine", load_external_data=False).graph
    (tokens,) = (value for value in graph.input if value.name == "tokens")
    one = tokens.type.tensor_type.shape.dim[1].dim_value == 1
    if any(value.name.startswith("layers.0.tokens") for value in graph.input):
        return "recomputing"
    return "stepwise" if one else "functional"


def _engine_logits(
    engine_dir: Path, ids: list[int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The engine's logits of the prompt at once, and of the rest token by token."""
    with SpikeEngine(engine_dir, threads=1, kv_cache_memory=8 << 20) as engine:
        return engine.score(ids[:PROMPT]), engine.score(ids, chunk_tokens=1)[PROMPT:]


def _compared(
    abi: str, why: str, ours: tuple[NDArray[np.float32], NDArray[np.float32]], theirs: Reference
) -> Outcome:
    """Where transformers' own cache gives other logits than the whole sequence, either will do."""
    limit = TOLERANCE * max(1.0, float(np.abs(theirs.prefill).max()) / 10)
    prefill = _worst(ours[0], theirs.prefill)
    decode = _worst(ours[1], theirs.whole)
    if theirs.stepwise is not None:
        own = _worst(theirs.stepwise, theirs.whole)
        stepwise = _worst(ours[1], theirs.stepwise)
        decode = min(decode, stepwise)
        if own > limit:
            which = "the cached steps" if stepwise == decode else "the whole sequence"
            said = f"transformers' cached steps differ from the whole by {own:.0e}"
            why = f"{said}; {which} count. {why}"
    status = "matches" if max(prefill, decode) <= limit else "differs"
    return Outcome(status, abi, prefill, decode, why)


def _worst(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.nan_to_num(np.abs(a - b), nan=np.inf).max())


def _sentence(error: BaseException) -> str:
    """Code and message of a SpikeError; type, message and place of anything else."""
    text = " ".join(
        (f"{error.code} {error.what}" if isinstance(error, SpikeError) else str(error)).split()
    )
    if not isinstance(error, SpikeError):
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        text = f"{type(error).__name__} at {where}: {text}"
    site = str(Path(transformers.__file__).parents[1])
    return text.replace(site, "").replace(str(Path.cwd()), "")[:NOTE]
