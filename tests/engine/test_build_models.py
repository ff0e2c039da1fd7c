"""Whole builds of small random and of the real checkpoints, compared with transformers in fp32.

The logits of an unquantised engine differ from the source's only by the order of sums: 1e-3
absolute, as the golden gate's own limit for float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from spikeinfer import ExitCode, SpikeEngine, SpikeError
from spikeinfer.driver import BuildRequest, BuildResult, build
from spikeinfer.passes import raise_activation
from spikeinfer.passes.repro import run_repro
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
)

MODELS = Path(__file__).parents[2] / ".cache" / "models"
TINY = ("tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-gpt2")
REAL = ("SmolLM2-135M-Instruct", "gemma-3-270m")
LOGIT_TOLERANCE = 1e-3
PREFILL, DECODE = 16, 64


@pytest.fixture(params=(*TINY, *REAL))
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SpikeEngine, object]]:
    """(float32 streaming engine, transformers model)."""
    source = MODELS / request.param
    build(
        BuildRequest(
            source, tmp_path / "engine", dtype="float32", enable_streaming=True, golden="off"
        )
    )
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with SpikeEngine(tmp_path / "engine") as engine:
        yield engine, model


def _source_logits(model: object, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()  # type: ignore[operator]


def _worst(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max())


def test_prefill_chunks_decode_and_ragged_batches_equal_the_source(
    built: tuple[SpikeEngine, object],
) -> None:
    engine, model = built
    rng = np.random.default_rng(0)
    length = min(PREFILL + DECODE, engine.max_seq_len)
    ids = rng.integers(5, engine.vocab_size, length).tolist()
    expected = _source_logits(model, ids)
    whole = engine.score(ids)
    assert _worst(whole, expected) <= LOGIT_TOLERANCE
    for chunk in (1, 7):
        assert _worst(engine.score(ids, chunk_tokens=chunk), expected) <= LOGIT_TOLERANCE
    prompts = [ids[:5], ids[5:18], ids[18:19], ids[19:36]]
    alone = [engine.complete(p, max_tokens=8).token_ids for p in prompts]
    together = [c.token_ids for c in engine.generate_batch(prompts, max_tokens=8)]
    assert together == alone


@pytest.mark.parametrize("name", TINY)
def test_functional_engines_equal_the_source_too(name: str, tmp_path: Path) -> None:
    source = MODELS / name
    result = build(BuildRequest(source, tmp_path / "engine", dtype="float32"))
    assert result.evidence.status == "passed"


def _settled(result: BuildResult) -> list[str]:
    return [r.name for r in result.reports if r.facts.get("validated")]


@pytest.mark.parametrize("name", TINY)
def test_passes_keep_the_meaning(name: str, tmp_path: Path) -> None:
    request = BuildRequest(
        MODELS / name,
        tmp_path / "engine",
        dtype="float32",
        enable_streaming=True,
        golden="off",
        verify_passes=True,
    )
    assert {"raise-attention", "alias-kv", "flatten-tokens"} <= set(_settled(build(request)))


def test_a_broken_pass_is_named_with_a_reproduction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tuple((pattern, "silu", {}) for pattern, _, _ in raise_activation.RULES)
    monkeypatch.setattr(raise_activation, "RULES", rules)
    output = tmp_path / "engine"
    with pytest.raises(SpikeError, match="raise-activation changes the result") as caught:
        build(BuildRequest(MODELS / "tiny-gpt2", output, golden="off", verify_passes=True))
    assert caught.value.code == "SPK307"
    assert str(tmp_path / "engine.repro") in caught.value.remedy
    assert not output.exists()
    outcome = run_repro(tmp_path / "engine.repro")
    assert outcome.difference > outcome.limit


def test_two_builds_give_the_same_bytes(tmp_path: Path) -> None:
    ids = set()
    for name in ("a", "b"):
        request = BuildRequest(
            MODELS / "tiny-llama",
            tmp_path / name,
            quantization="q8_0",
            enable_streaming=True,
            golden="off",
            workers=1 + len(ids),
        )
        manifest = build(request).manifest
        assert manifest is not None
        ids.add(manifest.engine_id)
    assert len(ids) == 1


def test_the_announced_snippet_on_both_kinds_of_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPIKE_CACHE_DIR", str(tmp_path / "cache"))
    for path in (MODELS / "SmolLM2-135M-Instruct", None):
        engine_path = path or next((tmp_path / "cache").glob("**/config.json")).parent
        engine = SpikeEngine(
            model_path=str(engine_path),
            quant_config={"kv_cache": "int4", "linear": "fp16"},
            max_seq_len=8192,
            device_map="auto",
        )
        text = engine.generate(prompt="The sky is", temperature=0.7, top_p=0.95, max_tokens=8)
        assert isinstance(text, str)
        engine.close()


def test_packed_gate_and_up_are_stored_apart(tmp_path: Path) -> None:
    """phi3 keeps gate and up in one matrix; the engine reads some of its rows as each."""
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=128,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "phi3")
    request = BuildRequest(
        tmp_path / "phi3", tmp_path / "engine", dtype="float32", enable_streaming=True
    )
    assert build(request).evidence.status == "passed"


def test_not_a_number_fails_the_gate(tmp_path: Path) -> None:
    """A model whose logits are NaN is no crash of the gate: exit 4, nothing published."""
    source = tmp_path / "nan"
    shutil.copytree(MODELS / "tiny-llama", source)
    config = json.loads((source / "config.json").read_text())
    config["rms_norm_eps"] = -1e9
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpikeError, match="SPK580") as caught:
        build(BuildRequest(source, tmp_path / "engine", enable_streaming=True))
    assert caught.value.exit_code == ExitCode.GOLDEN_FAILED
    assert not (tmp_path / "engine").exists()


SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
STRUCTURES = {
    "ALiBi": BloomConfig(vocab_size=256, hidden_size=64, n_layer=2, n_head=4),
    "packed biases": GPT2Config(
        vocab_size=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "MLP biases": LlamaConfig(
        **SMALL, intermediate_size=96, num_key_value_heads=2, mlp_bias=True, attention_bias=True
    ),
    "latent cache": DeepseekV3Config(
        **SMALL,
        intermediate_size=96,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=2,
    ),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_equal_the_source(structure: str, streaming: bool, tmp_path: Path) -> None:
    """Random weights, biases too: those that transformers starts with are zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(STRUCTURES[structure])
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.05 * torch.randn_like(tensor))
    model.save_pretrained(tmp_path / "source")
    request = BuildRequest(
        tmp_path / "source",
        tmp_path / "engine",
        dtype="float32",
        enable_streaming=streaming,
    )
    assert build(request).evidence.status == "passed"


def test_what_cannot_stream_names_the_blocking_node(tmp_path: Path) -> None:
    """Falcon rounds its ALiBi to bfloat16: no slope times a distance, so it stays as it is."""
    config = FalconConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "falcon")
    with pytest.raises(SpikeError, match=r"SPK306 .*flatten-tokens refuses"):
        build(BuildRequest(tmp_path / "falcon", tmp_path / "engine", enable_streaming=True))
