"""Links of a chain give what each of them gives alone, on any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.external_data_helper import set_external_data
from spikeinfer import kernels

Floats = NDArray[np.float32]

K, M = 256, 512
LINKS = """%3 = RmsNorm %1 @{norm}:f32[256] eps=1e-05
%4 = Linear %3 @{square}:u8[{square_bytes}] - %1 format=q4_k k=256 n=256
%5 = GatedMlp %4 @{up}:u8[{up_bytes}] @{up}:u8[{up_bytes}] @{down}:u8[{down_bytes}] %1 \
activation=silu down_format=q8_0 gate_format=q4_k k=256 m=512 n=256 up_format=q4_k
%6 = RmsNorm %5 @{norm}:f32[256] %4 eps=1e-05
%7 = Linear %6 @{square}:u8[{square_bytes}] format=q4_k k=256 n=256
%8 = Linear %7 @{square}:u8[{square_bytes}] - %2 format=q4_k k=256 n=256
return %6 %8"""

Chain = Callable[..., ort.InferenceSession]
OpSession = Callable[..., ort.InferenceSession]


class Weights:
    """Four constants in one file, each at a multiple of 4096."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.norm = rng.standard_normal(K, np.float32)
        self.square = self._packed(rng, "q4_k", K, K)
        self.up = self._packed(rng, "q4_k", M, K)
        self.down = self._packed(rng, "q8_0", K, M)
        self.places: dict[str, int] = {}
        self.file = b""
        for name in ("norm", "square", "up", "down"):
            data = getattr(self, name)
            self.file += b"\0" * (-len(self.file) % 4096)
            self.places[name] = len(self.file)
            self.places[f"{name}_bytes"] = data.nbytes
            self.file += data.tobytes()

    @staticmethod
    def _packed(rng: np.random.Generator, fmt: kernels.Format, n: int, k: int) -> NDArray[np.uint8]:
        blocks = kernels.quantize(rng.standard_normal((n, k), np.float32) / 16, fmt)
        return kernels.pack(blocks, fmt, n, k)

    def links(self) -> str:
        """LINKS with the constants' places."""
        return LINKS.format(**self.places)


WEIGHTS = Weights()


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """A session of one chain over x and y: chain(links, results=2, threads=2)."""

    def make(links: str, results: int = 2, threads: int = 2) -> ort.InferenceSession:
        (tmp_path / "w").write_bytes(WEIGHTS.file)
        tensor = TensorProto(
            name="w", data_type=TensorProto.UINT8, dims=[len(WEIGHTS.file)], raw_data=b""
        )
        set_external_data(tensor, "w", offset=0, length=len(WEIGHTS.file))
        tensor.ClearField("raw_data")
        names = [f"r{i}" for i in range(results)]
        node = helper.make_node(
            "Chain", ["w", "x", "y"], names, "the_chain", domain="spike", links=links
        )
        ports = [
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in side]
            for side in (("x", "y"), names)
        ]
        graph = helper.make_graph([node], "chain", *ports, [tensor])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("spike", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        (tmp_path / "model").write_bytes(model.SerializeToString())
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.register_custom_ops_library(str(kernels.ops_library()))
        return ort.InferenceSession(str(tmp_path / "model"), options)

    return make


def inputs(rows: int, seed: int = 1) -> dict[str, Floats]:
    """x and y of so many rows."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((rows, K), np.float32) for name in ("x", "y")}


def apart(op_session: OpSession, feeds: dict[str, Floats]) -> list[Floats]:
    """The results of LINKS, each link in a session of its own."""

    def run(op: str, order: list[str], given: dict[str, Floats], **options: object) -> Floats:
        weights = {n: getattr(WEIGHTS, n) for n in order if n in ("square", "up", "down")}
        kinds = dict.fromkeys(given, "f32")
        made = op_session(op, kinds, {"o": "f32"}, weights=weights, order=order, **options)
        (found,) = made.run(None, given)
        return np.asarray(found)

    square = {"format": "q4_k", "k": K, "n": K}
    mlp = {"k": K, "m": M, "n": K, "activation": "silu", "down_format": "q8_0"}
    mlp |= {"gate_format": "q4_k", "up_format": "q4_k"}
    x, y, norm = feeds["x"], feeds["y"], WEIGHTS.norm
    h = run("RmsNorm", ["x", "n"], {"x": x, "n": norm}, eps=1e-5)
    a = run("Linear", ["x", "square", "", "r"], {"x": h, "r": x}, **square)
    b = run("GatedMlp", ["x", "up", "up", "down", "r"], {"x": a, "r": x}, **mlp)
    c = run("RmsNorm", ["x", "n", "r"], {"x": b, "n": norm, "r": a}, eps=1e-5)
    d = run("Linear", ["x", "square"], {"x": c}, **square)
    return [c, run("Linear", ["x", "square", "", "r"], {"x": d, "r": y}, **square)]


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33, 130])
def test_a_chain_has_the_bits_of_its_links(rows: int, chain: Chain, op_session: OpSession) -> None:
    feeds = inputs(rows)
    want = apart(op_session, feeds)
    for threads in (1, 2, 5):
        session = chain(WEIGHTS.links(), threads=threads)
        for _ in range(3):
            for got, expected in zip(session.run(None, feeds), want, strict=True):
                np.testing.assert_array_equal(got, expected)


def test_one_session_serves_several_threads(chain: Chain) -> None:
    session = chain(WEIGHTS.links())
    feeds = [inputs(rows, seed=rows) for rows in (1, 3, 40, 90)]
    want = [session.run(None, feed) for feed in feeds]
    different: list[int] = []

    def serve(i: int) -> None:
        for _ in range(30):
            got = session.run(None, feeds[i])
            if any((a != b).any() for a, b in zip(got, want[i], strict=True)):
                different.append(i)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(len(feeds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not different


def test_a_link_that_fails_is_named_and_the_next_run_is_right(chain: Chain) -> None:
    session = chain(WEIGHTS.links())
    good = inputs(4)
    want = session.run(None, good)
    with pytest.raises(Exception, match=r"spike\.Linear 'the_chain:5': residual"):
        session.run(None, {**good, "y": good["y"][:3]})
    for got, expected in zip(session.run(None, good), want, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("links", "problem"),
    [
        ("return", "no link"),
        ("%3 = Linnear %1\nreturn %3", "there is no op 'Linnear'"),
        ("%3 = RmsNorm %1 eps=1\nreturn %3", "1 inputs and 1 outputs that don't fit"),
        ("%3 = RmsNorm %1 - eps=1\nreturn %3", "don't fit"),
        ("%3 = RmsNorm %1 %2\nreturn %3", "eps"),
        ("%3 = RmsNorm %1 @999999:f32[256] eps=1\nreturn %3", "lies outside the weights"),
        ("%3 = RmsNorm %1 @0:f32[999999999] eps=1\nreturn %3", "lies outside the weights"),
        ("%3 = RmsNorm %1 @0:f16[256] eps=1\nreturn %3", "'@0:f16\\[256\\]' can't be read"),
        ("%3 = RmsNorm %4 %2 eps=1\n%4 = RmsNorm %1 %2 eps=1\nreturn %3", "before it is made"),
        ("%3 = RmsNorm %1 %2 eps=1\n%3 = RmsNorm %1 %2 eps=1\nreturn %3", "%3 is made twice"),
        ("%3 = RmsNorm %1 %2 eps=1\nreturn %4", "%4 is returned, but no link makes it"),
        ("%3 = RmsNorm %x %2 eps=1\nreturn %3", "'%x' can't be read"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(links: str, problem: str, chain: Chain) -> None:
    with pytest.raises(Exception, match=problem):
        chain(links, results=1)
