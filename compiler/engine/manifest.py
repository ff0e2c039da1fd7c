"""manifest.json: what the directory must hold, byte for byte, and what it was made from."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from .config import FORMAT_VERSION
from .schema import SchemaError, decoder, encode

MANIFEST = "manifest.json"
CONFIG = "config.json"
EVIDENCE = "evidence.json"
REPORT = "report.html"
PARETO = "pareto.json"
MODEL = "rank0.engine"
WEIGHTS = "rank0.weights"
NETWORK = "network.json"
DEVICE_CHECK = "device-check.yaml"

FORMAT: Final = "spikeinfer-engine"

NOT_IDENTITY = (EVIDENCE, REPORT, PARETO)
"""Files that describe the engine; a new measurement does not make it another engine."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 (hex) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Provenance:
    """What the engine was made from.

    Args:
        source_hash: hash of the checkpoint (`Checkpoint.source_hash`).
        recipe: every option of the build, after defaults and flags. No paths, no times.
        versions: package name to version, for everything that shapes the bytes.
        required_cpu_features: flags as /proc/cpuinfo spells them; empty runs on every CPU.
        not_reproducible: files whose bytes differ between builds of the same inputs.
    """

    source_hash: str
    recipe: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    required_cpu_features: tuple[str, ...] = ()
    not_reproducible: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The whole of manifest.json. Build it with `seal_manifest`, read it with `read_manifest`.

    `engine_id` is one hash over the files that decide what the engine computes; `manifest_sha256`
    is over this file itself with that field empty. `tensors` maps a weight's name to the sha256 of
    its bytes in rank0.weights.
    """

    engine_id: str
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, str]
    provenance: Provenance
    spikeinfer_version: str
    manifest_sha256: str = ""
    format: Literal["spikeinfer-engine"] = FORMAT
    format_version: int = FORMAT_VERSION


def seal_manifest(
    files: Mapping[str, FileEntry],
    tensors: Mapping[str, str],
    provenance: Provenance,
    spikeinfer_version: str,
) -> Manifest:
    """A manifest with its two hashes filled in."""
    open_manifest = Manifest(
        engine_id=_engine_id(files),
        files=dict(files),
        tensors=dict(tensors),
        provenance=provenance,
        spikeinfer_version=spikeinfer_version,
    )
    digest = hashlib.sha256(encode(open_manifest)).hexdigest()
    return dataclasses.replace(open_manifest, manifest_sha256=digest)


_manifest = decoder(Manifest)


def read_manifest(data: object, text: bytes) -> Manifest:
    """The manifest of this format version that `parse(text)` gave, checked by its own hash.

    Raises:
        SchemaError: damaged, edited, or not a manifest.
    """
    manifest = _manifest(data)
    sealed = f'"manifest_sha256": "{manifest.manifest_sha256}"'.encode()
    unsealed = text.replace(sealed, b'"manifest_sha256": ""', 1)
    if hashlib.sha256(unsealed).hexdigest() != manifest.manifest_sha256:
        raise SchemaError("it does not match its own hash: it was damaged or edited")
    return manifest


def _engine_id(files: Mapping[str, FileEntry]) -> str:
    lines = [
        f"{name}\0{entry.size}\0{entry.sha256}\n"
        for name, entry in sorted(files.items())
        if name not in NOT_IDENTITY
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
