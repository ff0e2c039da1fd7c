"""Every causal language model type of the installed transformers, at its default (full) size.

The weight files are sparse: right names, shapes and lengths as `save_pretrained` would write
them, but almost no data, so that a 600B mixture of experts costs a few megabytes of disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.errors import SpikeError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


def meta_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def write_sparse(directory: Path, config: Any, model: Any) -> None:
    """config.json and a sparse model.safetensors with the tensors that transformers would save."""
    config.save_pretrained(directory)
    state = model.state_dict()
    for name in model.all_tied_weights_keys:
        state.pop(name, None)
    stored: Mapping[str, torch.Tensor] = revert_weight_conversion(model, state)
    header, offset = {}, 0
    for name, tensor in stored.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
        for entry in header.values():  # so that no two tensors look tied
            begin, end = entry["data_offsets"]
            file.seek(8 + len(raw) + begin)
            file.write(os.urandom(min(64, end - begin)))


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_type_at_full_size(tmp_path: Path, model_type: str) -> None:
    try:
        config = CONFIG_MAPPING[model_type]()
        model = meta_model(config)
    except Exception as error:  # the type's own defaults don't make a model
        pytest.skip(
            f"transformers {transformers.__version__} builds no default {model_type}: {error!r:.60}"
        )
    write_sparse(tmp_path, config, model)
    # decoders cut out of an encoder-decoder (BartForCausalLM) say so in the config that they save
    encoder = model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", False
    )
    if encoder or config.is_encoder_decoder:
        with pytest.raises(SpikeError, match="SPK117"):
            Checkpoint.open(tmp_path)
        return
    checkpoint = Checkpoint.open(tmp_path)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: info.shape for name, info in checkpoint.parameters.items()} == expected
    assert checkpoint.unused == ()
    assert checkpoint.notes == ()


def test_opening_a_70b_checkpoint_reads_almost_nothing(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
    )
    write_sparse(tmp_path, config, meta_model(config))
    read_before = bytes_read()
    checkpoint = Checkpoint.open(tmp_path)
    assert sum(info.shape[0] for info in checkpoint.parameters.values()) > 0
    assert len(checkpoint.parameters) == 723
    # headers, config, and one chunk of each of the two matrices that may be tied
    assert bytes_read() - read_before < 16e6
    assert checkpoint.load("model.layers.79.mlp.down_proj.weight").shape == (8192, 28672)


def bytes_read() -> int:
    """Bytes that this process asked the kernel for with read calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))
