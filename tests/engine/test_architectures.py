"""A fixed subset of the sweep over all model types (`make test-all`): one type per feature.

Small random models, compiled unquantised and compared with transformers' eager float32 logits: a
prefill of 24 tokens and 8 decode steps, to 1e-3 (`TOLERANCE` in benchmarks/architecture_worker.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from spikeinfer import SpikeEngine
from spikeinfer.compiler.assembly.overflow import find_overflow
from spikeinfer.compiler.assembly.progress import Progress
from spikeinfer.driver import BuildRequest, build

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "architectures"

STREAMING = (
    "llama",  # grouped queries, RMS norm, gated MLP
    "gemma2",  # soft-caps, alternating windows, norms of 1 + weight
    "gemma4_text",  # heads of two widths, embeddings per layer
    "gpt2",  # learned positions, transposed weights, packed QKV
    "gpt_neox",  # parallel residual, partial rotary
    "olmo2",  # norms after the blocks
    "phi3",  # packed QKV and gate
    "cohere",  # interleaved rotary, layer norm without bias
    "granite",  # multipliers
    "smollm3",  # layers without rotary
    "biogpt",  # a mask indexed by tensors
)
FUNCTIONAL = (
    "falcon",  # one key head
    "bloom",  # ALiBi
    "gpt_oss",  # attention sinks, experts with biases
    "qwen3_moe",  # experts
    "deepseek_v2",  # latent attention, complex rotary
    "llama4_text",  # chunked attention
    "gpt_neo",  # a mask from a table of fixed length
    "bert",  # an encoder as decoder
    "roberta",  # positions of its own
    "xglm",  # sinusoidal positions
    "deepseek_v32",  # sparse attention: the best of at most k keys
    "mpt",  # a table of biases sliced by the length
)
STEPWISE = (
    "mamba2",  # convolution and state space, no keys
    "jamba",  # state space and attention and experts
    "qwen3_next",  # gated delta rule
    "lfm2",  # short convolutions
)
RECOMPUTING = (
    "openai-gpt",  # no cache at all
)


@pytest.fixture(scope="module")
def worker() -> Iterator[ModuleType]:
    """`benchmarks/architecture_worker.py`, a script's module beside its siblings."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("architecture_worker")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in ("architecture_worker", "shrunk_configs"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("model_type", STREAMING)
def test_streaming_types_match_and_stream(worker: ModuleType, model_type: str) -> None:
    outcome = worker.examine(model_type, CACHE)
    assert (outcome.status, outcome.abi) == ("matches", "streaming"), outcome


@pytest.mark.parametrize("model_type", FUNCTIONAL)
def test_other_types_match_with_steps_of_any_length(worker: ModuleType, model_type: str) -> None:
    outcome = worker.examine(model_type, CACHE)
    assert outcome.status == "matches", outcome
    assert outcome.abi in ("functional", "streaming"), outcome  # stepwise would be a step back


@pytest.mark.parametrize("model_type", STEPWISE)
def test_recurrent_types_match_token_by_token(worker: ModuleType, model_type: str) -> None:
    outcome = worker.examine(model_type, CACHE)
    assert outcome.status == "matches", outcome
    assert "SPK2" in outcome.reason, outcome  # why it cannot stream


@pytest.mark.parametrize("model_type", RECOMPUTING)
def test_types_that_keep_nothing_match_by_recomputing(worker: ModuleType, model_type: str) -> None:
    outcome = worker.examine(model_type, CACHE)
    assert (outcome.status, outcome.abi) == ("matches", "recomputing"), outcome


def test_a_wrong_engine_does_not_match(worker: ModuleType) -> None:
    """The comparison bites: logits off by 2e-3 in one decode step are not a match."""
    import numpy as np

    right = np.zeros((8, 4), np.float32)
    off = right.copy()
    off[5, 2] = 2 * worker.TOLERANCE
    theirs = worker.Reference(right, right, None)
    assert worker._compared("functional", "", (right, right), theirs).status == "matches"
    assert worker._compared("functional", "", (right, off), theirs).status == "differs"


@pytest.fixture(scope="module")
def sweep_script(worker: ModuleType) -> Iterator[ModuleType]:
    """`benchmarks/architectures.py`."""
    yield importlib.import_module("architectures")
    sys.modules.pop("architectures", None)


def test_the_committed_table_has_every_type(sweep_script: ModuleType) -> None:
    text = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")][1:]
    assert rows == list(sweep_script.TYPES)


@pytest.mark.parametrize(("model_type", "step"), [("mamba2", 1), ("openai-gpt", 64)])
def test_sequences_of_one_engine_keep_their_own_states(
    worker: ModuleType, tmp_path: Path, model_type: str, step: int
) -> None:
    """Prompts that share steps give what they give alone, also when blocks are used again.

    Every pass is verified on the way: steps of one token, and steps that recompute. The memory plan
    is for the largest step: `step` tokens.
    """
    source = worker.checkpoint(model_type, CACHE)
    request = BuildRequest(
        source, tmp_path / "engine", dtype="float32", golden="off", verify_passes=True
    )
    assert build(request).memory["tokens"] == step
    prompts = [[5, 9, 20, 31], [40, 7], [8] * 6]
    with SpikeEngine(tmp_path / "engine", threads=1) as engine:
        alone = [engine.complete(p, max_tokens=6).token_ids for p in prompts]
        together = [c.token_ids for c in engine.generate_batch(prompts, max_tokens=6)]
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == len(prompts)


def test_half_precision_of_steps_of_one_token(worker: ModuleType, tmp_path: Path) -> None:
    """Calibration reads its text token by token, and so does the search for overflows."""
    source = worker.checkpoint("mamba2", CACHE)
    request = BuildRequest(source, tmp_path / "engine", dtype="float16", golden="off")
    found = build(request).config
    assert found is not None
    observed = [p for p in found.spike.precision if p.op and p.observed]
    assert {p.dtype for p in observed} == {"f16", "f32"}
    ids = worker._tokens()
    theirs = worker._reference(source, ids)
    prefill, decode = worker._engine_logits(tmp_path / "engine", ids)
    # f16 rounds 11 bits: measured 0.0064 at logits of 4.5.
    assert worker._worst(prefill, theirs.prefill) < 0.03
    assert worker._worst(decode, theirs.whole) < 0.03
    report = find_overflow(source, "float16", None, Progress())
    assert report.nodes > 50
    assert report.found == ()
