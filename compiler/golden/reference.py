"""The source itself as a scorer: transformers, float32, eager attention.

Only this file of the package needs torch and transformers, and only when it is called.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ExitCode, SpikeError
from .sets import Float32, Provenance

# float32 weights plus activations and the logits of a short text.
HEADROOM = 1.25


@dataclass(frozen=True)
class Rebuilt:
    """A source that transformers can't open by itself, such as a GGUF file.

    Attributes:
        files: that hold its weights.
        parameters: how many weights there are.
        make: builds transformers' model in float32, in evaluation mode.
    """

    files: tuple[Path, ...]
    parameters: int
    make: Callable[[], Any]


@dataclass
class Reference:
    """A loaded source model. Use as a context manager: leaving frees its memory.

    Attributes:
        directory: the checkpoint.
        model: transformers' causal language model, float32, in evaluation mode.
        files: that hold its weights.
    """

    directory: Path
    model: Any
    files: tuple[Path, ...] = ()

    @staticmethod
    def load(directory: Path, rebuilt: Rebuilt | None = None) -> Reference:
        """Load a checkpoint in float32: its directory, unless it has to be `rebuilt`.

        Raises:
            SpikeError: SPK545 without transformers, SPK546 if it can't fit into free memory.
        """
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise SpikeError(
                "SPK545",
                "golden",
                f"the source model can't be run here: {error}.",
                "Install spikeinfer[build], or give a recorded set (--golden FILE).",
                ExitCode.UNSUPPORTED,
            ) from error
        if rebuilt is not None:
            _require_memory(rebuilt.parameters)
            return Reference(directory, rebuilt.make(), rebuilt.files)
        files = sorted(directory.glob("*.safetensors"))
        _require_memory(sum(map(_parameter_count, files)))
        model = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        return Reference(directory, model.eval(), tuple(files))

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self.model = None
        gc.collect()

    @property
    def vocab_size(self) -> int:
        """Width of the logits: rows of the output embedding."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def max_length(self) -> int:
        """Longest sequence that the source's configuration allows."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 1 << 20)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End-of-sequence ids of the configuration and the generation configuration."""
        found: set[int] = set()
        for source in (self.model.config.get_text_config(), self.model.generation_config):
            ids = getattr(source, "eos_token_id", None)
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        return frozenset(found)

    def score(self, tokens: list[int]) -> Float32:
        """Logits float32 ``[T, V]`` of every position, one run without cache."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return np.asarray(logits.numpy(), dtype=np.float32)

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` likeliest next tokens, with the source's own cache; ends after a stop.

        The checkpoint's generation defaults (penalties, sampling) are set aside.
        """
        import torch
        from transformers import GenerationConfig

        stops = sorted(self.stop_tokens)
        defaults = self.model.generation_config
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=stops or None, pad_token_id=stops[0] if stops else 0
        )
        try:
            prompt = torch.tensor([tokens])
            output = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count
            )
        finally:
            self.model.generation_config = defaults
        return [int(token) for token in output[0, len(tokens) :]]

    def provenance(self) -> Provenance:
        """How logits of this object come about, for a golden set."""
        libraries = ("transformers", "torch", "numpy")
        rebuilt = bool(self.files) and self.files[0].parent != self.directory
        return Provenance(
            model=self.files[0].stem if rebuilt else self.directory.resolve().name,
            architecture=type(self.model).__name__,
            weights={file.name: _sha256(file) for file in self.files},
            dtype="float32",
            attention="eager",
            versions={name: importlib.metadata.version(name) for name in libraries},
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_memory(parameters: int) -> None:
    """Refuse before loading what would end in the kernel killing the build."""
    needed = int(parameters * 4 * HEADROOM)
    available = _available_memory()
    if available is not None and needed > available:
        raise SpikeError(
            "SPK546",
            "golden",
            f"the source needs {needed / 1e9:.1f} GB as float32, "
            f"{available / 1e9:.1f} GB are free.",
            "Record a set on a larger machine (spike golden record) and give it with --golden "
            "FILE, or skip the gate with --golden off.",
            ExitCode.UNSUPPORTED,
        )


def _parameter_count(file: Path) -> int:
    """Number of elements in a safetensors file, from its header alone."""
    from safetensors import safe_open

    with safe_open(str(file), framework="np") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
    return sum(int(np.prod(shape)) for shape in shapes)


def _available_memory() -> int | None:
    """Bytes the kernel thinks can be had without swapping; None where it doesn't say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        pages, size = os.sysconf_names.get("SC_PHYS_PAGES"), os.sysconf_names.get("SC_PAGE_SIZE")
        return os.sysconf(pages) * os.sysconf(size) if pages and size else None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
