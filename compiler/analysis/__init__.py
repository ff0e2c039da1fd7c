"""What can be known of a graph's values without trusting luck: ranges, errors, overflow.

bounds.py     intervals and row norms      weights.py      norms of constants
intervals.py  bounds of every value        sensitivity.py  what rounding a value costs
interval_*.py the rule of each op: elements, rows, blocks, and the facts they ask
observe.py    ranges on calibration text   certify.py      both against a format: certificates
overflow.py   which node exceeds a format first
"""

from .bounds import Bound
from .certify import Analysis, Certificate, Evidence
from .formats import FORMATS, Format
from .intervals import intervals
from .observe import Observed, States, Steps, observe, prefill
from .overflow import Overflow, OverflowReport, locate
from .weights import Weights

__all__ = [
    "FORMATS",
    "Analysis",
    "Bound",
    "Certificate",
    "Evidence",
    "Format",
    "Observed",
    "Overflow",
    "OverflowReport",
    "States",
    "Steps",
    "Weights",
    "intervals",
    "locate",
    "observe",
    "prefill",
]
