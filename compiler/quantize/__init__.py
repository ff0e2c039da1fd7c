"""Storage formats of weights: which tensor gets which, and how its bytes are made.

names.py    quantisation names      roles.py   what a tensor is for
policy.py   the rules, as a table   plan.py    the rules applied to a whole model
store.py    quantise and pack, streaming    error.py   how far that is from the source
ready.py    blocks that exist       feedback.py  error feedback, given what the inputs are
int4.py     int4_sym as TensorRT reads it
"""

from __future__ import annotations

from .error import ErrorMeter
from .names import Quantization
from .plan import Choice, Given, StoragePlan, TensorSpec, plan, stored_bytes
from .policy import ModelFacts
from .ready import Blocks, store_blocks
from .roles import Role
from .store import CHUNK_ELEMENTS, store

__all__ = [
    "CHUNK_ELEMENTS",
    "Blocks",
    "Choice",
    "ErrorMeter",
    "Given",
    "ModelFacts",
    "Quantization",
    "Role",
    "StoragePlan",
    "TensorSpec",
    "plan",
    "store",
    "store_blocks",
    "stored_bytes",
]
