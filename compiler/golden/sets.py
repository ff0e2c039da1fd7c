"""What a golden set holds, and its two files: `NAME.yaml` for people, `NAME.npz` for numbers.

`golden/README.md` in the repository specifies both files without code. Everything a check needs is
in them: neither the model nor a tokenizer is opened again.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from ...errors import SpikeError

FORMAT = 1
ARRAYS = ("top_ids", "top_logits", "probe_logits", "next_logits", "lse")
# What numpy, zip and YAML readers raise on files that are missing, cut off or not theirs.
UNREADABLE = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, yaml.YAMLError)
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class GoldenPrompt:
    """One recorded sequence: a prompt and the source's greedy continuation, teacher forced.

    Row r of the arrays describes the logits after token `first + r` of `sequence`; N rows, K kept
    tokens, P probes. Logits are what the model returns: after a soft-cap or scale, before softmax.

    Attributes:
        name: unique in the set.
        text: what was tokenised; empty when the prompt was given as ids.
        tokens: prompt ids.
        greedy: the source's greedy continuation; it ends early at an end-of-sequence token.
        first: first recorded position; 0 unless the prompt is long.
        top_ids: int32 ``[N, K]``, the K most likely tokens, likeliest first.
        top_logits: float32 ``[N, K]``, their logits.
        probe_logits: float32 ``[N, P]``, logits of the set's probe tokens.
        next_logits: float32 ``[N-1]``, the logit of the token that follows in `sequence`.
        lse: float64 ``[N, 2]``, log-sum-exp of all logits, and of those not in `top_ids`.
    """

    name: str
    text: str
    tokens: tuple[int, ...]
    greedy: tuple[int, ...]
    first: int
    top_ids: Ids
    top_logits: Float32
    probe_logits: Float32
    next_logits: Float32
    lse: Float64

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and continuation: what a scorer is given."""
        return self.tokens + self.greedy

    @property
    def top_logprobs(self) -> Float64:
        """Float64 ``[N, K]``: natural-log probabilities of `top_ids`."""
        return self.top_logits.astype(np.float64) - self.lse[:, :1]

    @property
    def margins(self) -> Float32:
        """Float32 ``[N]``: how far the likeliest token leads, in nats."""
        return self.top_logits[:, 0] - self.top_logits[:, 1]


@dataclass(frozen=True)
class Provenance:
    """How a set was made.

    Attributes:
        model: checkpoint directory's name.
        architecture: class that computed it.
        weights: sha256 of each weight file, by file name.
        dtype: compute dtype of the source, ``float32``.
        attention: attention implementation of the source, ``eager``.
        versions: of the libraries that computed it.
    """

    model: str
    architecture: str
    weights: dict[str, str]
    dtype: str
    attention: str
    versions: dict[str, str]


@dataclass(frozen=True)
class GoldenSet:
    """Recorded behaviour of one source checkpoint.

    Attributes:
        name: file stem.
        vocab_size: width V of the source's logits.
        probe_ids: int32 ``[P]``, fixed tokens whose logits are stored at every position.
        prompts: the recorded sequences.
        made: how.
    """

    name: str
    vocab_size: int
    probe_ids: Ids
    prompts: tuple[GoldenPrompt, ...]
    made: Provenance
    format: int = field(default=FORMAT)

    def save(self, directory: Path) -> Path:
        """Write `NAME.npz`, then `NAME.yaml` (each by rename); returns the YAML's path.

        The same set gives the same bytes.
        """
        directory.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, npt.NDArray[Any]] = {"probe_ids": self.probe_ids}
        for prompt in self.prompts:
            for name in ARRAYS:
                arrays[f"{prompt.name}.{name}"] = getattr(prompt, name)
        numbers = directory / f"{self.name}.npz"
        temporary = directory / f".{self.name}.{os.getpid()}.npz"
        np.savez_compressed(temporary, allow_pickle=False, **arrays)
        temporary.replace(numbers)
        page = directory / f"{self.name}.yaml"
        temporary = directory / f".{self.name}.{os.getpid()}.yaml"
        temporary.write_text(self.to_yaml(), encoding="utf-8")
        temporary.replace(page)
        return page

    def to_yaml(self) -> str:
        """The YAML page: provenance, prompts, tokens."""
        made = self.made
        page = {
            "format": self.format,
            "name": self.name,
            "vocab_size": self.vocab_size,
            "made": {
                "model": made.model,
                "architecture": made.architecture,
                "weights": dict(made.weights),
                "dtype": made.dtype,
                "attention": made.attention,
                "versions": dict(made.versions),
            },
            "prompts": [
                {
                    "name": prompt.name,
                    "text": prompt.text,
                    "tokens": list(prompt.tokens),
                    "greedy": list(prompt.greedy),
                    "first": prompt.first,
                }
                for prompt in self.prompts
            ],
        }
        return yaml.safe_dump(
            page, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None
        )

    @staticmethod
    def load(path: Path) -> GoldenSet:
        """Read a set by its YAML file (the `.npz` lies beside it).

        Raises:
            SpikeError: SPK541 if a file is missing or unreadable, SPK542 if they contradict.
        """
        try:
            page = yaml.safe_load(path.read_text(encoding="utf-8"))
            with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except UNREADABLE as error:
            raise SpikeError(
                "SPK541",
                "golden",
                f"{path} or the .npz beside it can't be read: {error}.",
                "Give the .yaml file of a set made by `spike golden record`.",
            ) from error
        return _assemble(path, page, arrays)


def _assemble(path: Path, page: Any, arrays: dict[str, npt.NDArray[Any]]) -> GoldenSet:
    """Join page and arrays into a checked set."""
    if not isinstance(page, dict) or page.get("format") != FORMAT:
        found = page.get("format") if isinstance(page, dict) else None
        raise _contradiction(path, f"says format {found}, this version reads {FORMAT}")
    try:
        prompts = tuple(_prompt(item, arrays) for item in page["prompts"])
        loaded = GoldenSet(
            name=page["name"],
            vocab_size=int(page["vocab_size"]),
            probe_ids=arrays["probe_ids"].astype(np.int32),
            prompts=prompts,
            made=Provenance(**page["made"]),
        )
    except (KeyError, TypeError) as error:
        raise _contradiction(path, f"lacks or has too much of: {error}") from error
    for prompt in prompts:
        _check_prompt(path, loaded, prompt)
    return loaded


def _prompt(item: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> GoldenPrompt:
    """One prompt from its YAML entry and its arrays."""
    name = item["name"]
    return GoldenPrompt(
        name=name,
        text=item["text"],
        tokens=tuple(item["tokens"]),
        greedy=tuple(item["greedy"]),
        first=int(item["first"]),
        top_ids=arrays[f"{name}.top_ids"].astype(np.int32),
        top_logits=arrays[f"{name}.top_logits"].astype(np.float32),
        probe_logits=arrays[f"{name}.probe_logits"].astype(np.float32),
        next_logits=arrays[f"{name}.next_logits"].astype(np.float32),
        lse=arrays[f"{name}.lse"].astype(np.float64),
    )


def _check_prompt(path: Path, loaded: GoldenSet, prompt: GoldenPrompt) -> None:
    """Shapes and id ranges of one prompt, before anything computes with them."""
    rows = len(prompt.sequence) - prompt.first
    shapes = (
        prompt.top_ids.shape[0],
        prompt.probe_logits.shape,
        prompt.next_logits.shape,
        prompt.lse.shape,
    )
    expected = (rows, (rows, loaded.probe_ids.size), (rows - 1,), (rows, 2))
    if shapes != expected or not prompt.tokens:
        raise _contradiction(path, f"prompt {prompt.name} has {rows} rows, the arrays {shapes}")
    if prompt.top_ids.shape != prompt.top_logits.shape or prompt.top_ids.shape[1] < 2:
        raise _contradiction(path, f"prompt {prompt.name}: top_ids and top_logits differ")
    ids = np.concatenate([prompt.sequence, prompt.top_ids.ravel(), loaded.probe_ids])
    if ids.min() < 0 or ids.max() >= loaded.vocab_size:
        raise _contradiction(path, f"prompt {prompt.name} has a token outside the vocabulary")


def _contradiction(path: Path, what: str) -> SpikeError:
    return SpikeError("SPK542", "golden", f"{path} {what}.", "Record the set again.")
