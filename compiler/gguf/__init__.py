"""GGUF files: read with suspicion, taken over bit for bit as a source of weights, and written.

reader.py   one file, checked     tensor_types.py  ggml's types and ours
names.py    parameter names -> tensor names
"""
