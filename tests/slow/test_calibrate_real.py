"""Importances of the real checkpoints against what transformers' and llama.cpp's matrices see."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import pytest
import torch
from spikeinfer.compiler.assembly.calibrate import calibrate, gguf_names, windows_of
from spikeinfer.compiler.assembly.progress import Progress
from spikeinfer.compiler.calibrate import read_imatrix, write_imatrix
from spikeinfer.compiler.engine import EngineDirectory
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.driver import BuildRequest, build
from spikeinfer.kernels import Format, unpack
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".cache" / "models"
PEER = ROOT / ".cache" / "peers" / "llama_cpp"
SMOLLM2 = "SmolLM2-135M-Instruct"
TOKENS, WINDOW = 512, 256
RELATIVE = 1e-4
"""f32 through 30 layers in another order of sums; of a matrix's largest channel."""


def hooked(checkpoint: Path, windows: Tensor) -> dict[str, Tensor]:
    """Sums of squares f64 [K] of the input of every linear module, by parameter."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            found[name] = found.get(name, 0) + x.square().sum(0)

        return hook

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(watch(f"{path}.weight"))
    with torch.no_grad():
        for window in windows:
            model(window[None], use_cache=False)
    return found


@pytest.mark.parametrize("name", [SMOLLM2, "gemma-3-270m"])
def test_importances_are_what_transformers_modules_see(name: str) -> None:
    found = calibrate(MODELS / name, [], TOKENS, WINDOW, 0, Progress())
    checkpoint = Checkpoint.open(MODELS / name)
    vocab = int(checkpoint.parameters["model.embed_tokens.weight"].shape[0])
    windows = windows_of(checkpoint, vocab, [None], TOKENS, WINDOW)
    assert windows.shape == (TOKENS // WINDOW, WINDOW)
    names = gguf_names(checkpoint)
    expected = hooked(MODELS / name, windows)
    expected["model.embed_tokens.weight"] = expected.pop("lm_head.weight")  # tied
    assert {t for p in expected for t in names[p]} == set(found.entries)
    for parameter, sums in expected.items():
        entry = found.entries[names[parameter][0]]
        assert entry.counts.tolist() == [TOKENS]
        error = np.abs(entry.sums - sums.numpy()).max() / float(sums.max())
        assert error < RELATIVE, (parameter, error)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of SmolLM2's importances."""
    path = tmp_path_factory.mktemp("imatrix") / "ours.gguf"
    write_imatrix(path, calibrate(MODELS / SMOLLM2, [], TOKENS, WINDOW, 0, Progress()))
    return path


def peer(*words: object) -> None:
    """Runs benchmarks/llama_cpp_imatrix.py inside llama.cpp's environment."""
    python, script = PEER / "venv/bin/python", ROOT / "benchmarks" / "llama_cpp_imatrix.py"
    model = PEER / "models" / f"{SMOLLM2}-f32.gguf"
    if not (PEER / "built").is_file() or not model.is_file():
        pytest.skip(f"run `python benchmarks/peers_llama_cpp.py .cache/models/{SMOLLM2}` first")
    done = subprocess.run(
        [str(w) for w in (python, script, words[0], model, *words[1:])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_importances_are_what_llama_cpps_matrices_see(ours: Path, tmp_path: Path) -> None:
    """Its own converter's file, its own tokens' places, its own products."""
    checkpoint = Checkpoint.open(MODELS / SMOLLM2)
    windows = windows_of(checkpoint, 49152, [None], TOKENS, WINDOW)
    np.save(tmp_path / "windows.npy", windows.numpy().astype(np.int32))
    peer("collect", tmp_path / "windows.npy", tmp_path / "theirs.npz")
    theirs, found = np.load(tmp_path / "theirs.npz"), read_imatrix(ours)
    names = {n.removesuffix(".in_sum2") for n in theirs.files if n.endswith(".in_sum2")}
    assert found.entries.keys() - names == {"token_embd.weight"}  # it leaves a tied head out
    assert len(names) == 30 * 7
    for name in names:
        sums = theirs[f"{name}.in_sum2"]
        assert found.entries[name].counts.tolist() == theirs[f"{name}.counts"].tolist()
        error = np.abs(found.entries[name].sums - sums).max() / sums.max()
        assert error < RELATIVE, (name, error)


def test_llama_cpp_quantises_with_our_file_as_we_do(ours: Path, tmp_path: Path) -> None:
    """The file as the gguf package reads it; then the bytes of every tensor of both mixes."""
    tensors = {t.name: t.data.reshape(t.data.shape) for t in gguf.GGUFReader(ours).tensors}
    np.savez(tmp_path / "ours.npz", **tensors)
    peer("quantise", tmp_path / "ours.npz", tmp_path / "theirs.gguf", "Q4_K_M")
    request = BuildRequest(
        MODELS / SMOLLM2, tmp_path / "engine", quantization="q4_k_m", golden="off", imatrix=ours
    )
    build(request)
    engine = EngineDirectory.open(tmp_path / "engine")
    data = engine.weights_path.read_bytes()
    theirs = {t.name: t for t in gguf.GGUFReader(tmp_path / "theirs.gguf").tensors}
    names = gguf_names(Checkpoint.open(MODELS / SMOLLM2))
    same = compared = 0
    for spec in engine.config.spike.weights:
        if len(spec.shape) < 2 or ".attn_q." in names[spec.parameters[0]][0]:
            continue  # q and k have their rows in another order there
        (name,) = names[spec.parameters[0]]
        if ".attn_k." in name:
            continue
        assert theirs[name].tensor_type.name.lower() == spec.format, name
        packed = np.frombuffer(data, np.uint8, spec.bytes, spec.offset)
        rows = unpack(packed, cast(Format, spec.format), *spec.shape)
        compared += rows.size
        same += int((rows.reshape(-1) == theirs[name].data.reshape(-1)).sum())
    assert compared > 80e6
    assert same / compared > 0.999, same / compared
