"""A file's metadata as a config.json: every key is understood, or the file is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ExitCode, SpikeError
from .families import FAMILIES, HARMLESS
from .reader import TensorEntry, Value
from .rope import FACTORS, llama3_parameters

TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
FLOATS = ("epsilon", "softcapping")
LARGEST = (1 << 31) - 1
LAYER = re.compile(r"blk\.(\d+)\.")
BESIDE = "Put the model's own config.json beside the file, in a directory with nothing else."


class Facts:
    """A file's statements about its model, checked as they are asked for.

    Args:
        path: the file, for messages.
        metadata: all keys.
        tensors: all tensors.
        values: float64 values of a small tensor.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Value],
        tensors: Mapping[str, TensorEntry],
        values: Callable[[str], npt.NDArray[np.float64]],
    ) -> None:
        self.path, self.metadata, self.tensors, self.values = path, metadata, tensors, values
        self.architecture = self._architecture()
        self.family = FAMILIES[self.architecture]

    def _architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if isinstance(name, str) and name in FAMILIES:
            return name
        stated = f"has the architecture {name!r}" if name else "states no architecture"
        kind = self.metadata.get("general.type", "model")
        if kind != "model":
            stated = f"holds no model: its general.type is {kind!r}"
        raise SpikeError(
            "SPK135",
            "gguf",
            f"{self.path} {stated}; those that can be built are {', '.join(FAMILIES)}.",
            "Build from the model's safetensors checkpoint instead.",
            ExitCode.UNSUPPORTED,
        )

    def get(self, key: str, default: Value | None = None) -> Value | None:
        """The architecture's own key."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero. Raises SPK136 for anything else, or if it is missing.

        Files hold float32: the shortest decimal number that it stands for is what was meant.
        """
        value = self.get(key, default)
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
        if not 0 < number < math.inf:
            raise self._wrong(key, value, "a number above zero")
        return float(str(np.float32(number)))

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero. Raises SPK136 for anything else, or if it is missing."""
        value = self.get(key, default)
        number = value if isinstance(value, int) and not isinstance(value, bool) else 0
        if not 0 < number <= LARGEST:
            raise self._wrong(key, value, "a whole number above zero")
        return number

    def _wrong(self, key: str, value: Value | None, wanted: str) -> SpikeError:
        shown = "missing" if value is None else f"{value!r:.80}"
        return self.refuse(f"{self.architecture}.{key} is {shown}, not {wanted}")

    def refuse(self, what: str, remedy: str = BESIDE) -> SpikeError:
        """SPK136 with this reason."""
        return SpikeError("SPK136", "gguf", f"{self.path}: {what}.", remedy, ExitCode.UNSUPPORTED)


def config_of(facts: Facts) -> dict[str, Any]:
    """config.json of the file's model.

    Raises: SPK136 for a key that is missing, has no valid value, or that we don't understand.
    """
    family = facts.family
    _refuse_unknown_keys(facts)
    config: dict[str, Any] = {"model_type": family.model_type, **family.implied}
    for key, name in family.fields.items():
        if facts.get(key) is not None or (name not in family.implied and key in REQUIRED):
            config[name] = facts.number(key) if key.endswith(FLOATS) else facts.count(key)
    _require_layers(facts)
    if config.get("n_inner") == 4 * config.get("n_embd", 0):
        del config["n_inner"]  # as config.json of GPT-2 leaves it out
    if "num_attention_heads" in config:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config |= {name: tensor in facts.tensors for name, tensor in family.biases.items()}
    config["vocab_size"] = _vocabulary(facts)
    config["tie_word_embeddings"] = "output.weight" not in facts.tensors
    for name, key in TOKEN_IDS.items():
        number = facts.metadata.get(key)
        known = isinstance(number, int) and 0 <= number < config["vocab_size"]
        config[name] = number if known else None
    if family.rope:
        config["rope_parameters"] = _rope(facts, config)
    if family.sliding_pattern:
        config |= _gemma(facts, config)
    config["dtype"] = "float32"
    return config


REQUIRED = (
    *("context_length", "block_count", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    *("expert_count", "expert_used_count", "attention.sliding_window"),
)


def _refuse_unknown_keys(facts: Facts) -> None:
    prefix = f"{facts.architecture}."
    known = {*facts.family.fields, *HARMLESS}
    for key in facts.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in known:
            value = facts.metadata[key]
            raise facts.refuse(
                f"it states {key} = {value!r:.80}, which we don't know the meaning of"
            )


def _require_layers(facts: Facts) -> None:
    """The layers that are counted are those that are there: nothing is built for a mere number."""
    stated = facts.count("block_count")
    found = {match[1] for name in facts.tensors if (match := LAYER.match(name))}
    if len(found) != stated or not all(str(i) in found for i in range(len(found))):
        raise facts.refuse(
            f"it states {facts.architecture}.block_count = {stated} and has {len(found)} layers",
            "Download the file again.",
        )


def _vocabulary(facts: Facts) -> int:
    entry = facts.tensors.get("token_embd.weight")
    if entry is None or len(entry.shape) != 2:
        raise facts.refuse("it has no matrix token_embd.weight", "Get the whole model.")
    return entry.shape[0]


def _head_dim(facts: Facts, config: Mapping[str, Any]) -> int:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    own = int(config.get("head_dim") or max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.count(key, own) != own:
            stated = f"{facts.architecture}.{key} is {facts.count(key)}"
            raise facts.refuse(f"{stated}, but keys have {own} dimensions, all of them rotated")
    return own


def _rope(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters`; sets head_dim if the file leaves it to the rotation."""
    own = _head_dim(facts, config)
    if "head_dim" in facts.family.fields.values():
        config["head_dim"] = own
    theta = facts.number("rope.freq_base", 10000.0)
    kind = facts.get("rope.scaling.type", "none")
    if FACTORS in facts.tensors:
        found = llama3_parameters(facts.values(FACTORS), theta) if kind == "none" else None
        if found is None or facts.family.sliding_pattern:
            raise facts.refuse(f"{FACTORS} isn't the scaling of a Llama 3 model")
        return found
    plain = {"rope_type": "default", "rope_theta": theta}
    if kind == "none":
        return plain
    if kind == "linear":
        return plain | {"rope_type": "linear", "factor": facts.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": facts.number("rope.scaling.factor"),
            "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
        }
        for name in ("beta_fast", "beta_slow"):
            if facts.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = facts.number(f"rope.scaling.yarn_{name}")
        return plain | scaling
    raise facts.refuse(f"its rope scaling {kind!r} can't be told from the metadata alone")


def _gemma(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 derive: which layers slide, their rotation, the scale of the scores."""
    layers, rope = int(config["num_hidden_layers"]), config["rope_parameters"]
    derived: dict[str, Any] = {"layer_types": _layer_types(facts, layers)}
    if facts.family.model_type == "gemma3_text":
        local = facts.number("rope.freq_base_swa", 10000.0)
        sliding = {"rope_type": "default", "rope_theta": local}
        derived["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
    elif facts.number("rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]:
        raise facts.refuse("its sliding layers rotate in their own way")
    largest = {"gemma2": 46, "gemma3": 62}[facts.architecture]
    scalar = config["head_dim"]
    if layers == largest:  # the 27B models, as llama.cpp knows them
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return derived | {"query_pre_attn_scalar": scalar}


def _layer_types(facts: Facts, layers: int) -> list[str]:
    pattern = facts.get("attention.sliding_window_pattern", facts.family.sliding_pattern)
    if isinstance(pattern, np.ndarray) and len(pattern) >= layers:
        slides = [bool(x) for x in pattern[:layers]]
    elif isinstance(pattern, int) and pattern > 0:
        slides = [i % pattern < pattern - 1 for i in range(layers)]
    else:
        raise facts.refuse(f"attention.sliding_window_pattern is {pattern!r:.80}")
    return ["sliding_attention" if slide else "full_attention" for slide in slides]
