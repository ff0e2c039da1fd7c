"""Makes judged.safetensors: layers packed and unpacked again by the tools that own the formats.

    pip download --no-deps auto-gptq==0.7.1 autoawq==0.2.9   # unpack both into PACKAGES
    pip install compressed-tensors==0.20.1
    python record_judged.py PACKAGES

Their packers write the parts, their own dequantisation gives `expected` in the dtype of the scales.
The packages aren't needed to run the tests. Single files of them are loaded, as the packages
themselves want a GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

N, K, GROUP = 32, 96, 32
Case = dict[str, torch.Tensor]


def from_file(name: str, path: Path) -> Any:
    """One module of a package that isn't installed."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def layer() -> torch.nn.Linear:
    linear = torch.nn.Linear(K, N, bias=False)
    torch.nn.init.normal_(linear.weight, std=0.05)
    return linear.half()


def auto_gptq(root: Path) -> Iterator[tuple[str, Case]]:
    """AutoGPTQ's plain PyTorch layer; unpacked by multiplying with the identity."""
    code = from_file("qlinear_cuda", root / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
    for bits in (2, 3, 4, 8):
        for kind in ("sym", "asym", "order"):
            made = code.QuantLinear(bits, GROUP, K, N, False)
            scales = (torch.rand(N, K // GROUP) + 0.5) * 0.1 / 2 ** (bits - 1)
            zeros = torch.full(scales.shape, 2.0 ** (bits - 1))
            if kind == "asym":  # its packer can't store zero point 0 (it wraps into its neighbours)
                zeros = torch.randint(1, 1 << bits, scales.shape).float()
            index = torch.arange(K, dtype=torch.int32) // GROUP
            index = index[torch.randperm(K)] if kind == "order" else index
            linear = layer()
            codes = torch.randint(0, 1 << bits, (N, K))
            exact = scales.half()[:, index.long()].float() * (codes - zeros[:, index.long()])
            linear.weight.data = exact.float()  # on the grid, so that packing rounds to the codes
            made.pack(linear, scales.half().float(), zeros, index)
            made.scales = made.scales.half()
            values = made.half()(torch.eye(K, dtype=torch.float16)).t()
            parts = {p: getattr(made, p) for p in ("qweight", "qzeros", "scales", "g_idx")}
            yield f"gptq-{bits}-{kind}", parts | {"expected": values}


def auto_awq(root: Path) -> Iterator[tuple[str, Case]]:
    """AutoAWQ's GEMM layer and its `dequantize_gemm`."""
    for name in ("awq", "awq.utils", "awq.modules"):
        sys.modules[name] = types.ModuleType(name)
    best: Any = types.ModuleType("awq.utils.utils")
    best.get_best_device = lambda: "cpu"
    sys.modules["awq.utils.utils"] = best
    from_file("awq.utils.module", root / "awq/utils/module.py")
    packing = from_file("awq.utils.packing_utils", root / "awq/utils/packing_utils.py")
    gemm = from_file("awq_gemm", root / "awq/modules/linear/gemm.py")
    scales = ((torch.rand(K // GROUP, N) + 0.5) * 0.1 / 8).half()
    zeros = torch.randint(0, 16, scales.shape)
    made = gemm.WQLinear_GEMM.from_linear(layer(), 4, GROUP, scales=scales, zeros=zeros)
    values = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, GROUP).t()
    parts = {p: getattr(made, p) for p in ("qweight", "qzeros", "scales")}
    yield "awq", parts | {"expected": values}


def compressed_tensors() -> Iterator[tuple[str, Case]]:
    """Its compressors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group: dict[str, Any] = {"strategy": "group", "group_size": GROUP}
    channel = {"strategy": "channel"}
    cases: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
        "pack-4": ("pack-quantized", {"num_bits": 4, **group}, torch.bfloat16),
        "pack-4-asym": (
            "pack-quantized", {"num_bits": 4, "symmetric": False, **group}, torch.float16,
        ),
        "pack-4-rows": ("pack-quantized", {"num_bits": 4, **channel}, torch.bfloat16),
        "pack-8": ("pack-quantized", {"num_bits": 8, **group}, torch.bfloat16),
        "pack-8-asym": (
            "pack-quantized", {"num_bits": 8, "symmetric": False, **group}, torch.bfloat16,
        ),
        "pack-2": ("pack-quantized", {"num_bits": 2, **group}, torch.float16),
        "int": ("int-quantized", {"num_bits": 8, **channel}, torch.bfloat16),
        "float": ("float-quantized", {"num_bits": 8, "type": "float", **channel}, torch.bfloat16),
        "float-blocks": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 80]},
            torch.float32,
        ),
    }  # fmt: skip
    for name, (form, values, dtype) in cases.items():
        args = QuantizationArgs(**values)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        grid = {"group": (N, K // GROUP), "channel": (N, 1), "block": (-(-N // 24), -(-K // 80))}
        shape = grid[str(args.strategy)]
        scales = ((torch.rand(shape) + 0.5) * 0.1 / 2 ** (args.num_bits - 1)).to(dtype)
        half = 1 << (args.num_bits - 1)
        zeros = torch.zeros(shape, dtype=torch.int8)
        if not args.symmetric:
            zeros = torch.randint(-half, half, shape).to(torch.int8)
        code = BaseCompressor.get_value_from_registry(form)
        state = {"weight": layer().weight.data.to(dtype), "weight_scale": scales}
        state |= {} if args.symmetric else {"weight_zero_point": zeros}
        packed = code.compress(state, scheme)
        yield f"ct-{name}", packed | {"expected": code.decompress(packed, scheme)["weight"]}


def main(root: Path) -> None:
    torch.manual_seed(0)
    stored: Case = {}
    for made in (auto_gptq(root), auto_awq(root), compressed_tensors()):
        for name, case in made:
            stored |= {f"{name}.{part}": t.detach().contiguous() for part, t in case.items()}
    made_by = {
        "auto-gptq": "0.7.1",
        "autoawq": "0.2.9",
        "compressed-tensors": importlib.metadata.version("compressed-tensors"),
        "torch": torch.__version__,
    }
    save_file(stored, Path(__file__).with_name("judged.safetensors"), metadata=made_by)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
