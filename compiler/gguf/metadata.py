"""A model's configuration as GGUF's keys, and the proof that nothing of it was lost.

The keys are read back by `config.py`; what comes out must be the configuration that went in, or
llama.cpp would compute another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...errors import ExitCode, SpikeError
from ..frontend.model_config import quiet_transformers
from .config import Facts, config_of
from .families import FAMILIES, Family
from .names import file_type
from .reader import TensorEntry, Value
from .rope import FACTORS, llama3_factors, wavelengths

NO_EFFECT = {
    # of a configuration, on what a model computes: names, training, ids that the tokenizer states
    *("_name_or_path", "architectures", "dtype", "transformers_version", "model_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp"),
    *("initializer_range", "router_aux_loss_coef", "output_router_logits", "max_window_layers"),
    *("attention_dropout", "embedding_dropout", "residual_dropout", "attn_pdrop", "embd_pdrop"),
    *("resid_pdrop", "tie_word_embeddings", "n_ctx", "reorder_and_upcast_attn"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    *("summary_use_proj", "id2label", "label2id", "problem_type", "is_encoder_decoder"),
}


def architecture_of(model_type: str) -> tuple[str, Family]:
    """`general.architecture` and what we know of it. Raises SPK590 for a type without one."""
    for name, family in FAMILIES.items():
        if family.model_type == model_type:
            return name, family
    raise SpikeError(
        "SPK590",
        "export",
        f"we can't state a {model_type} model in GGUF.",
        f"Those that can be exported are {', '.join(f.model_type for f in FAMILIES.values())}.",
        ExitCode.UNSUPPORTED,
    )


def parsed_config(stated: Mapping[str, object]) -> PretrainedConfig:
    """The configuration object of an engine's source. Raises SPK590 for a type without GGUF."""
    model_type = str(stated["model_type"])
    architecture_of(model_type)
    with quiet_transformers():
        config: PretrainedConfig = CONFIG_MAPPING[model_type].from_dict(dict(stated))
    return config


def metadata_of(config: PretrainedConfig, quantization: str) -> dict[str, Value]:
    """`general.*` and the architecture's own keys."""
    name, family = architecture_of(config.model_type)
    values = {key: getattr(config, field, None) for key, field in family.fields.items()}
    own: dict[str, Value] = {key: value for key, value in values.items() if value is not None}
    if family.model_type == "gpt2":
        own.setdefault("feed_forward_length", 4 * config.n_embd)
    own["vocab_size"] = config.vocab_size
    if family.rope:
        own |= _rope(config)
    if family.sliding_pattern:
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        usual = [
            i % family.sliding_pattern < family.sliding_pattern - 1 for i in range(len(slides))
        ]
        if slides != usual:
            own["attention.sliding_window_pattern"] = np.array(slides)
    general: dict[str, Value] = {"general.architecture": name, "general.type": "model"}
    if (kind := file_type(quantization)) is not None:
        general["general.file_type"] = kind
    general["general.quantization_version"] = 2
    return general | {f"{name}.{key}": value for key, value in own.items()}


def _head(config: PretrainedConfig) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _rope(config: PretrainedConfig) -> dict[str, Value]:
    head, parameters = _head(config), config.rope_parameters
    keys: dict[str, Value] = {"rope.dimension_count": head, "attention.key_length": head,
                              "attention.value_length": head}  # fmt: skip
    if "full_attention" in parameters:
        keys["rope.freq_base_swa"] = float(parameters["sliding_attention"]["rope_theta"])
        parameters = parameters["full_attention"]
    keys["rope.freq_base"] = float(parameters["rope_theta"])
    kind = parameters.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        keys["rope.scaling.type"] = kind
        keys["rope.scaling.factor"] = float(parameters["factor"])
    if kind == "yarn":
        original = parameters["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = int(original)
        for name in ("beta_fast", "beta_slow"):
            if parameters.get(name) is not None:
                keys[f"rope.scaling.yarn_{name}"] = float(parameters[name])
    return keys


def rope_factors(config: PretrainedConfig) -> npt.NDArray[np.float32] | None:
    """`rope_freqs.weight` of a Llama 3 model, float32 [head / 2]; None for another rotation."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "llama3":
        return None
    waves = wavelengths(parameters["rope_theta"], _head(config))
    original = parameters["original_max_position_embeddings"]
    return llama3_factors(waves, parameters["factor"], original).astype(np.float32)


def require_nothing_lost(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, TensorEntry],
    config: PretrainedConfig,
) -> None:
    """Raises SPK590 if the keys stand for another model than `config`."""
    factors = rope_factors(config)

    def values(name: str) -> npt.NDArray[np.float64]:
        assert name == FACTORS
        assert factors is not None
        return factors.astype(np.float64)

    read = config_of(Facts(path, metadata, tensors, values))
    with quiet_transformers():
        back = CONFIG_MAPPING[read.pop("model_type")](**read).to_dict()
    wanted = config.to_dict()
    for name in sorted({*wanted, *back} - NO_EFFECT):
        if wanted.get(name) != back.get(name):
            raise SpikeError(
                "SPK590",
                "export",
                f"the model has {name} = {wanted.get(name)!r:.120}, and GGUF's "
                f"{metadata['general.architecture']} architecture stands for "
                f"{back.get(name)!r:.120}: llama.cpp would compute another model.",
                "Such a model has no GGUF file that llama.cpp understands.",
                ExitCode.UNSUPPORTED,
            )
