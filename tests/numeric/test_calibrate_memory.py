"""A walk's memory does not grow with the number of layers; each weight is loaded once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json, re, sys
from collections import Counter
import torch
from spikeinfer.compiler.calibrate import collect
from spikeinfer.compiler.ir import parse_graph

HIDDEN, INNER, HEADS, WINDOWS, LENGTH = 512, 1536, 8, 8, 256
SHAPES = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN),
          "o": (HIDDEN, HIDDEN), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN),
          "down": (HIDDEN, INNER), "n1": (HIDDEN,), "n2": (HIDDEN,)}

def model(layers):
    shapes = {"e": (1000, HIDDEN)}
    shapes |= {f"{n}{i}": s for i in range(layers) for n, s in SHAPES.items()}
    lines = ["graph llama fused {", "  input %tokens : i64[B, S]", "  input %positions : i64[B, S]"]
    lines += [f'  const @{n} : f32{list(s)} = parameter "{n}"' for n, s in shapes.items()]
    stream, heads = f"f32[B, S, {HIDDEN}]", f"[B, S, {HEADS}, {HIDDEN // HEADS}]"
    major = f"f32[B, {HEADS}, S, {HIDDEN // HEADS}]"
    lines.append(f"  %h0 = embedding(@e, %tokens) : {stream}")
    for i in range(layers):
        lines.append(f"  %n{i} = rms_norm(%h{i}, @n1{i}, eps=1e-05) : {stream}")
        for p in "qkv":
            lines.append(f"  %{p}{i} = linear(%n{i}, @{p}{i}) : {stream}")
            lines.append(f"  %{p}r{i} = reshape(%{p}{i}, shape={heads}) : f32{heads}")
            lines.append(f"  %{p}t{i} = transpose(%{p}r{i}, perm=[0, 2, 1, 3]) : {major}")
        lines.append(f"  %a{i} = attention(%qt{i}, %kt{i}, %vt{i}, scale=0.125) : {major}")
        lines.append(f"  %at{i} = transpose(%a{i}, perm=[0, 2, 1, 3]) : f32{heads}")
        lines.append(f"  %ar{i} = reshape(%at{i}, shape=[B, S, {HIDDEN}]) : {stream}")
        lines.append(f"  %r{i} = linear_residual(%ar{i}, @o{i}, %h{i}) : {stream}")
        lines.append(f"  %m{i} = rms_norm(%r{i}, @n2{i}, eps=1e-05) : {stream}")
        mlp = f"gated_mlp(%m{i}, @gate{i}, @up{i}, @down{i}, %r{i})"
        lines.append(f"  %h{i + 1} = {mlp} : {stream}")
    lines += [f"  %y = linear(%h{layers}, @e) : f32[B, S, 1000]", "  output %y", "}"]
    return parse_graph("\\n".join(lines)), shapes

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

def run(layers):
    graph, shapes = model(layers)
    asked = Counter()
    def parameters(name):
        asked[name] += 1
        return torch.randn(shapes[name]) * 0.02 + (len(shapes[name]) == 1)
    windows = torch.zeros(WINDOWS, LENGTH, dtype=torch.long)
    found = collect(graph, parameters, windows, {}, threads=1)
    return len(found.entries), asked

run(1)  # what torch allocates once
result = []
for layers in (2, 8):
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts over
    before = peak()
    entries, asked = run(layers)
    result.append({"before": before, "peak": peak(), "entries": entries,
                   "asked twice": [n for n, c in asked.items() if c > 1]})
print(json.dumps(result))
"""
LAYER_MB = (4 * 512 * 512 + 3 * 512 * 1536) * 4 / 2**20
STREAM_MB = 8 * 256 * 512 * 4 / 2**20
SLACK_MB = 4
"""Of the allocator; far less than six more layers' weights, or one value kept of each of them."""


def test_peak_memory_does_not_grow_with_layers() -> None:
    at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves the process
    words = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", env=at_once)
    assert done.returncode == 0, done.stderr[-2000:]
    few, many = json.loads(done.stdout)
    print(few, many)
    assert (few["entries"], many["entries"]) == (2 * 7 + 1, 8 * 7 + 1)
    assert few["asked twice"] == many["asked twice"] == []
    assert min(6 * LAYER_MB, 6 * STREAM_MB) > SLACK_MB
    assert many["peak"] - few["peak"] < SLACK_MB
