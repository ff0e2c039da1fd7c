"""TensorRT engines on the GPU of this machine: built for it, run, and held against the source.

`make test-gpu` runs this wherever a GPU of TensorRT for RTX is; elsewhere every test is skipped and
says why. It was written on a machine without a GPU and has not been run on one yet.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest
from spikeinfer.compiler.assembly.request import BuildRequest
from spikeinfer.compiler.backends.tensorrt import have_gpu
from spikeinfer.compiler.engine import EngineDirectory
from spikeinfer.compiler.engine.revise import evidence_in
from spikeinfer.console.terminal import Terminal
from spikeinfer.console.verify_device import verify_on_device
from spikeinfer.driver import build
from spikeinfer.runtime import SpikeEngine
from spikeinfer.runtime.cuda import Gpu

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
PROMPTS = [[1, 5, 9, 12], [3, 3, 7], [2, 4, 6, 8, 10, 12, 14, 16], [11]]


def why_not() -> str:
    """Why nothing can be run here; empty if it can."""
    try:
        version("tensorrt-rtx")
    except PackageNotFoundError:
        return "tensorrt-rtx is not installed"
    return "" if have_gpu() else "this machine has no NVIDIA GPU"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")


@pytest.fixture(scope="module", params=["none", "int4_sym"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engines") / request.param
    build(
        BuildRequest(
            MODELS / "tiny-llama", output, backend="tensorrt", target_sm="current",
            quantization=request.param, max_seq_len=128, max_batch_size=4, max_num_tokens=32,
        )
    )  # fmt: skip
    return output


def test_the_gpu_gives_back_what_it_was_given() -> None:
    gpu = Gpu()
    address, content = gpu.allocate(1 << 20), gpu.host_array(1 << 20)
    gpu.copy_out(content, address)
    gpu.wait()
    assert not content.any()  # fresh memory is zeroed
    content[:] = np.arange(1 << 20, dtype=np.uint32).astype(np.uint8)
    kept = content.copy()
    gpu.copy_in(address, content)
    gpu.wait()
    content[:] = 0
    gpu.copy_out(content, address)
    gpu.wait()
    np.testing.assert_array_equal(content, kept)
    assert gpu.free_memory() > 0
    gpu.close()


def test_the_device_does_what_was_emulated(engine: Path) -> None:
    assert verify_on_device(engine, Terminal()) == 0
    evidence = evidence_in(EngineDirectory.open(engine, verify=True))
    assert evidence.validated_on_gpu is True
    assert "the engine's own kernels ran on" in evidence.executed


def test_sequences_together_say_what_each_says_alone(engine: Path) -> None:
    """Rows of other sequences, idle rows and chunks must not be seen. Sums have another order in
    other batches, so that logits are compared, not tokens."""
    with SpikeEngine(engine) as running:
        alone = [running.complete(p, max_tokens=8).token_ids for p in PROMPTS]
        together = running.generate_batch(PROMPTS, max_tokens=8)
        for prompt, tokens, completion in zip(PROMPTS, alone, together, strict=True):
            whole = running.score([*prompt, *tokens])
            stepped = running.score([*prompt, *tokens], chunk_tokens=1)
            np.testing.assert_allclose(whole, stepped, atol=0.1)
            for at, token in enumerate(completion.token_ids):
                row = whole[len(prompt) + at - 1]
                assert row[token] > row.max() - 0.2
                if token != tokens[at]:
                    break  # a near tie: from here on the texts differ
