"""config.json of a checkpoint, as `transformers` understands it, checked before anything is built.

Only local files are read and no code from the checkpoint is ever run.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from ...errors import SpikeError
from .json_file import read_json_object
from .prequantized.methods import KEYS as QUANTISATION_KEYS
from .prequantized.methods import read_scheme

CONFIG = "config.json"
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@dataclass(frozen=True)
class ModelConfig:
    """The configuration: `raw` as in config.json, `parsed` as transformers' own object."""

    raw: Mapping[str, Any]
    parsed: PretrainedConfig
    model_type: str


def read_config(directory: Path, model_type: str | None = None) -> ModelConfig:
    """Read and check config.json of `directory`.

    Args:
        directory: the checkpoint directory, which must hold config.json.
        model_type: what the user says the type is; must agree with config.json where that says it.

    Raises: SPK105, SPK107, SPK116-118, SPK120, SPK122, SPK127, SPK140 (see `checkpoint.py`).
    """
    raw = read_json_object(directory / CONFIG, "SPK105")
    stated = _model_type(directory, raw, model_type)
    _require_causal(directory, stated, raw)
    read_scheme(directory, raw)  # refuses methods by name before anything else is looked at
    with quiet_transformers():
        try:
            # AutoConfig has a few rules of its own, but needs a stated type
            loader = AutoConfig if "model_type" in raw else CONFIG_MAPPING[stated]
            parsed = loader.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises a dozen types for bad values
            raise _rejected(directory, stated, error) from error
    _forget_quantisation(parsed)
    _require_decoder(directory, stated, parsed)
    _require_known_rope(directory, parsed)
    return ModelConfig(raw, parsed, parsed.model_type)


def meta_model(model: ModelConfig, dtype: torch.dtype) -> torch.nn.Module:
    """A new `AutoModelForCausalLM` without weights (meta device), eager attention.

    Raises: SPK122 if the model class doesn't accept the configuration.
    """
    config = copy.deepcopy(model.parsed)  # from_config writes into it
    with quiet_transformers(), torch.device("meta"):
        try:
            built = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=dtype, trust_remote_code=False
            )
        except Exception as error:  # the model's own code on a user's values: anything may come
            raise _rejected(None, model.model_type, error) from error
    module: torch.nn.Module = built.eval()
    return module


def float_model(model: ModelConfig, values: Callable[[str], torch.Tensor]) -> torch.nn.Module:
    """transformers' model in float32 with these values, eager attention: a reference to run.

    Raises: SPK122 as `meta_model`.
    """
    config = copy.deepcopy(model.parsed)
    with quiet_transformers(), no_init_weights():
        built = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False
        )
    with torch.no_grad():
        for name, tensor in built.state_dict().items():
            tensor.copy_(values(name))
    module: torch.nn.Module = built.eval()
    return module


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' warnings off the screen: what matters is checked and said by us."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def _model_type(directory: Path, raw: Mapping[str, Any], given: str | None) -> str:
    stated = raw.get("model_type")
    if stated is not None and given is not None and stated != given:
        raise SpikeError(
            "SPK127",
            "checkpoint",
            f"the model type {given!r} was asked for, but {CONFIG} in {directory} says {stated!r}.",
            f"Leave --model-type out, or give {stated}.",
        )
    chosen = stated if stated is not None else given
    if not isinstance(chosen, str) or not chosen:
        raise SpikeError(
            "SPK116",
            "checkpoint",
            f"{CONFIG} in {directory} names no `model_type`.",
            "Use the transformers version of the checkpoint, or give --model-type.",
        )
    if chosen not in CONFIG_MAPPING_NAMES:
        raise _unknown_type(directory, chosen, raw)
    return chosen


def _unknown_type(directory: Path, model_type: str, raw: Mapping[str, Any]) -> SpikeError:
    remedy = f"{near_matches(model_type, CAUSAL)}Correct `model_type`, or install a transformers "
    remedy += f"version that has it (this one is {transformers.__version__})."
    own_code = ""
    if "auto_map" in raw:
        own_code = " The checkpoint brings its own Python code, which SpikeInfer never runs."
    return SpikeError(
        "SPK116",
        "checkpoint",
        f"model type {model_type!r} in {CONFIG} of {directory} is unknown.{own_code}",
        remedy,
    )


def near_matches(word: str, known: Iterable[str]) -> str:
    """`"Did you mean llama? "` for the nearest of `known`, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(near)}? " if near else ""


def _require_causal(directory: Path, model_type: str, raw: Mapping[str, Any]) -> None:
    """Refuse models that don't predict the next token: by type, and by the stated class."""
    stated = raw.get("architectures")
    classes = [item for item in stated if isinstance(item, str)] if isinstance(stated, list) else []
    if model_type not in CAUSAL:
        raise _not_causal(directory, model_type, "transformers has no causal language model for it")
    for name in classes:
        task = _other_task(model_type, name)
        if task:
            raise _not_causal(directory, model_type, f"its architecture {name} is made for {task}")


def _require_decoder(directory: Path, model_type: str, config: PretrainedConfig) -> None:
    """Refuse encoders, whose *LMHead class attends to later tokens unless `is_decoder` is set."""
    if config.is_encoder_decoder:
        raise _not_causal(directory, model_type, "it is an encoder-decoder")
    may_be_encoder = model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if may_be_encoder and not getattr(config, "is_decoder", False):
        raise _not_causal(
            directory, model_type, "it is an encoder (`is_decoder` isn't true in its config)"
        )


def _other_task(model_type: str, architecture: str) -> str | None:
    """The task of a class that exists for this type but isn't its causal LM or base model."""
    tasks = []
    for name, mapping in vars(modeling_auto).items():
        if not name.endswith("_MAPPING_NAMES") or not isinstance(mapping, Mapping):
            continue
        classes = mapping.get(model_type, ())
        if architecture in ((classes,) if isinstance(classes, str) else classes):
            tasks.append(name)
    if not tasks or "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES" in tasks or "MODEL_MAPPING_NAMES" in tasks:
        return None
    words: str = tasks[0].removeprefix("MODEL_").removeprefix("FOR_").removesuffix("_MAPPING_NAMES")
    return words.lower().replace("_", " ")


def _not_causal(directory: Path, model_type: str, why: str) -> SpikeError:
    return SpikeError(
        "SPK117",
        "checkpoint",
        f"{directory} holds a {model_type} model that isn't a causal language model: {why}.",
        "Use a checkpoint of a decoder-only text generation model (a *ForCausalLM class).",
    )


def _forget_quantisation(config: PretrainedConfig) -> None:
    """What is built and traced is the plain model: `prequantized` unpacks the weights."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for key in QUANTISATION_KEYS:
            if hasattr(part, key):
                delattr(part, key)


def _rejected(directory: Path | None, model_type: str, error: Exception) -> SpikeError:
    place = f" in {directory}" if directory else ""
    cause = " ".join(str(error).split()) or type(error).__name__
    return SpikeError(
        "SPK122",
        "checkpoint",
        f"{CONFIG}{place} isn't a valid {model_type} configuration: "
        f"{type(error).__name__}: {cause[:400]}.",
        "Correct the value, or download config.json again.",
    )


def _require_known_rope(directory: Path, config: PretrainedConfig) -> None:
    """Refuse a RoPE scaling type that the model's code doesn't have: transformers only warns."""
    for part in (config, config.get_text_config()):
        known = {"default", *ROPE_INIT_FUNCTIONS} | {
            name.removeprefix("_validate_").removesuffix("_rope_parameters")
            for name in dir(part)
            if name.startswith("_validate_") and name.endswith("_rope_parameters")
        }
        for rope_type in _rope_types(getattr(part, "rope_parameters", None)):
            if rope_type not in known:
                raise SpikeError(
                    "SPK118",
                    "checkpoint",
                    f"rope type {rope_type!r} in {CONFIG} of {directory} is unknown; "
                    f"known are {', '.join(sorted(known))}.",
                    f"{near_matches(str(rope_type), known)}Correct `rope_type`, or install a "
                    "transformers version that has it.",
                )


def _rope_types(parameters: object) -> Iterator[object]:
    """Every rope type in flat or per-layer-type rope parameters."""
    if not isinstance(parameters, Mapping):
        return
    rope_type = parameters.get("rope_type", parameters.get("type"))
    if rope_type is not None:
        yield rope_type
    for value in parameters.values():
        yield from _rope_types(value)
