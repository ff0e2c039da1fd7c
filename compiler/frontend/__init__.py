"""From a checkpoint directory to traced IR; no weight is read on the way.

checkpoint.py, weight_*.py, tied_weights.py  what the directory holds, and under which names
fake_model.py, cache_slots.py, trace.py      transformers' own model, exported on fake weights
lower*.py, in_place.py, size_branches.py     aten ops to IR, and what cannot be lowered
import_model.py                              all of it in one call
"""
