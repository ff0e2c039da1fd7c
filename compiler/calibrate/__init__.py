"""What a model's matrices see on calibration text: the second moments of their inputs.

stages.py       a graph cut where the inputs of matrices must be known for all tokens
stage_graph.py  one stage as a graph of its own, its weights prepared once
inputs.py       what the matrices of a node see of some tokens
moments.py      sums of squares and products over tokens, the same for any number of threads
walk.py         all windows through all stages, one stage's weights at a time
"""

from __future__ import annotations

from .moments import Moment
from .walk import Visit, walk

__all__ = ["Moment", "Visit", "walk"]
