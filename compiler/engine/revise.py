"""The same engine with new evidence, published as a build does: whole, in one step."""

from __future__ import annotations

from . import manifest as names
from .checks import REBUILD
from .directory import EngineDirectory
from .evidence import Evidence
from .manifest import Manifest
from .schema import decode, parse
from .writer import EngineWriter

MADE_ANEW = (names.CONFIG, names.EVIDENCE, names.REPORT)


def evidence_in(engine: EngineDirectory) -> Evidence:
    """What evidence.json holds."""
    return decode(Evidence, parse((engine.path / names.EVIDENCE).read_bytes()))


def publish_evidence(engine: EngineDirectory, evidence: Evidence) -> Manifest:
    """Replaces an engine that has no rank0.weights by itself and this evidence.

    Its files are copied, so that a reader finds the old engine or the new one. Raises as
    `EngineWriter`.
    """
    assert names.WEIGHTS not in engine.manifest.files, REBUILD
    manifest = engine.manifest
    with EngineWriter(engine.path, version=manifest.spikeinfer_version) as writer:
        for name in manifest.files:
            if name not in MADE_ANEW:
                writer.copy(engine.path / name)
        writer.stage(engine.config, manifest.provenance)
        return writer.publish(evidence)
