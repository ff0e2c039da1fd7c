"""What a model's matrices see on calibration text: the second moments of their inputs.

stages.py       a graph cut where the inputs of matrices must be known for all tokens
stage_graph.py  one stage as a graph of its own, its weights prepared once
inputs.py       what the matrices of a node see of some tokens
moments.py      sums of squares and products over tokens, the same for any number of threads
walk.py         all windows through all stages, one stage's weights at a time
importance.py   mean squares of every matrix's input channels
imatrix.py      files of them, as llama.cpp has them
"""

from __future__ import annotations

from .imatrix import read_imatrix, write_imatrix
from .importance import Entry, Importance, collect
from .moments import Moment
from .walk import Visit, walk

__all__ = [
    "Entry",
    "Importance",
    "Moment",
    "Visit",
    "collect",
    "read_imatrix",
    "walk",
    "write_imatrix",
]
