"""`--imatrix`: importances from a file, for the matrices of one build."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import ExitCode, SpikeError
from ...passes.base import PassReport
from ..calibrate import Importance, read_imatrix
from ..frontend.checkpoint import Checkpoint
from ..ir import Constant, Graph
from ..quantize import Quantization, Role
from .calibrate import gguf_names
from .pipeline import GivenFormat
from .progress import Progress
from .request import BuildRequest

UNWEIGHTED = ("array", "f32", "f16", "bf16", "q8_0")
"""Formats that store each value as well as they can: nothing to weigh."""


@dataclass(frozen=True)
class Weighting:
    """Importances of a graph's matrices.

    Args:
        path: the file.
        importance: what it holds.
        names: parameter -> tensors in GGUF.
    """

    path: Path
    importance: Importance
    names: Mapping[str, Sequence[str]]

    def __call__(self, const: Constant) -> npt.NDArray[np.float32] | None:
        """f32 [K], of stacked experts [E, K]; None if the file has none."""
        return self.importance.of(const, self.names)

    def check(
        self, graph: Graph, kept: GivenFormat, reports: Sequence[PassReport], tell: Progress
    ) -> None:
        """Holds the file against a placed graph; says what it lacks, in the report too.

        Args:
            kept: the format of a matrix whose blocks are taken over as the source has them.

        Raises SPK413 if it belongs to another model, SPK819 if no matrix is to be quantised.
        """
        weighed = [  # a table of embeddings multiplies nothing
            c
            for c in graph.constants.values()
            if c.parameter and c.format not in UNWEIGHTED and c.role != Role.TOKEN_EMBD
            if kept(c) is None
        ]
        if not weighed:
            raise _no_use("a build that quantises no matrix: all are floats, q8_0, or taken over")
        missing = self.importance.require_fit(weighed, self.names)
        if missing:
            tell.note(
                f"{self.path.name} has no importances for {len(missing)} of {len(weighed)} "
                f"matrices, which are quantised without: {', '.join(missing[:3])}"
                f"{', ...' if len(missing) > 3 else ''}"
            )
        unseen = self.importance.unseen
        for name, experts in unseen.items():
            listed = ", ".join(map(str, experts))
            tell.note(f"{name}: experts {listed} saw no token and get the mean of the others")
        facts = {
            "file": self.path.name,
            "sha256": hashlib.sha256(self.path.read_bytes()).hexdigest(),
            "datasets": list(self.importance.datasets),
            "matrices": len(weighed) - len(missing),
            "without": missing,
            "experts without tokens": unseen,
        }
        for report in reports:
            if report.name == "assign-storage":
                report.facts["importances"] = facts


def weighting(
    request: BuildRequest, checkpoint: Checkpoint, quantization: Quantization
) -> Weighting | None:
    """What the request's file says; None without one.

    Raises SPK819 if the quantisation has no use for it, and as `read_imatrix`.
    """
    if request.imatrix is None:
        return None
    if quantization.value in UNWEIGHTED and not request.formats:  # overrides may ask for blocks
        raise _no_use(f"--quantization {quantization.value}")
    path = Path(request.imatrix)
    return Weighting(path, read_imatrix(path), gguf_names(checkpoint))


def _no_use(beside: str) -> SpikeError:
    return SpikeError(
        "SPK819",
        "command line",
        f"--imatrix has no use with {beside}: it weighs the errors of quantising to block formats.",
        "Leave it out, or choose a quantization such as q4_k_m.",
        ExitCode.USAGE,
    )
