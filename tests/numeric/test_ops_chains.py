"""A chain has the bits of its links one by one, on any number of threads; its errors are theirs."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper
from spikeinfer import kernels
from spikeinfer.compiler.backends.chains import chain_node
from spikeinfer.kernels import ops_library

WIDTH, HIDDEN, LAYERS = 256, 512, 3
Arrays = dict[str, np.ndarray]


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layers() -> tuple[list[NodeProto], Arrays]:
    """MLPs behind each other, and a norm with a sum behind each: nodes and their constants."""
    nodes, constants = [], Arrays()
    sizes = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    attributes = {"activation": "silu", "k": WIDTH, "m": HIDDEN, "n": WIDTH}
    attributes |= {f"{name}_format": "q4_k" for name in sizes}
    for i in range(LAYERS):
        for j, (name, (n, k)) in enumerate(sizes.items()):
            blocks = kernels.quantize(floats(10 * i + j, n, k), "q4_k")
            constants[f"{name}{i}"] = kernels.pack(blocks, "q4_k", n, k)
        constants[f"norm{i}"] = floats(10 * i + 9, WIDTH)
        weights = [f"{name}{i}" for name in sizes]
        nodes += [
            helper.make_node("GatedMlp", [f"x{i}", *weights], [f"h{i}"], domain="spike",
                             **attributes),
            helper.make_node("RmsNorm", [f"h{i}", f"norm{i}", f"x{i}"], [f"x{i + 1}"],
                             domain="spike", eps=1e-5),
        ]  # fmt: skip
    return nodes, constants


def written(folder: Path, constants: Mapping[str, np.ndarray]) -> dict[str, TensorProto]:
    """The weights file, and each constant as a byte range of it."""
    tensors = {}
    with (folder / "rank0.weights").open("wb") as file:
        for name, data in constants.items():
            file.write(b"\0" * (-file.tell() % 4096))
            kind = helper.np_dtype_to_tensor_dtype(data.dtype)
            tensor = TensorProto(name=name, data_type=kind, dims=data.shape)
            tensors[name] = _external(tensor, file.tell(), data.nbytes)
            file.write(data.tobytes())
    return tensors


def _external(tensor: TensorProto, offset: int, length: int) -> TensorProto:
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "rank0.weights", "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def session(
    folder: Path,
    nodes: Sequence[NodeProto],
    constants: Mapping[str, np.ndarray],
    threads: int,
    *,
    apart: bool = False,
) -> ort.InferenceSession:
    """x0 -> x{LAYERS}: one chain over the whole weights file, or one per node."""
    folder.mkdir()
    tensors = written(folder, constants)
    result = nodes[-1].output[0]
    if apart:
        chains = [chain_node([n], n.output, f"c{i}") for i, n in enumerate(nodes)]
        initialisers = list(tensors.values())
        between = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None)
                   for c in chains for n in c.output]  # fmt: skip
    else:
        chains = [chain_node(nodes, [result], "c", "weights", tensors)]
        size = (folder / "rank0.weights").stat().st_size
        whole = TensorProto(name="weights", data_type=TensorProto.UINT8, dims=[size])
        initialisers, between = [_external(whole, 0, size)], []
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x0", result))
    graph = helper.make_graph(chains, "g", [x], [y], initialisers, value_info=between)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("spike", 1)]
    path = folder / "rank0.engine"
    path.write_bytes(
        helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(ops_library()))
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(one: ort.InferenceSession, x: np.ndarray) -> np.ndarray:
    return one.run(None, {"x0": x})[0]


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_the_bits_are_those_of_single_links(tmp_path: Path, threads: int) -> None:
    """Also where the memory of a longer step is used again, and with threads without a core."""
    nodes, constants = layers()
    chain = session(tmp_path / "chain", nodes, constants, threads)
    apart = session(tmp_path / "apart", nodes, constants, 1, apart=True)
    for i, tokens in enumerate((1, 130, 0, 7, 130, 1)):
        x = floats(100 + i, tokens, WIDTH)
        np.testing.assert_array_equal(run(chain, x), run(apart, x))


def test_sessions_and_runs_beside_each_other(tmp_path: Path) -> None:
    nodes, constants = layers()
    chains = [session(tmp_path / f"{i}", nodes, constants, i + 1) for i in range(3)]
    inputs = [floats(i, 3 + i, WIDTH) for i in range(6)]
    wanted = [run(chains[0], x) for x in inputs]
    got: list[list[np.ndarray]] = [[] for _ in inputs]

    def work(i: int) -> None:
        for _ in range(20):
            got[i].append(run(chains[i % len(chains)], inputs[i]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for results, want in zip(got, wanted, strict=True):
        assert len(results) == 20
        for result in results:
            np.testing.assert_array_equal(result, want)


def _in_child(
    folder: Path,
    model: tuple[list[NodeProto], Arrays],
    x: np.ndarray,
    done: multiprocessing.Queue[np.ndarray],
) -> None:
    done.put(run(session(folder, *model, 2), x))


def test_a_forked_process_makes_its_own_session(tmp_path: Path) -> None:
    model = layers()  # the quantiser has threads of its own, which a child doesn't inherit
    chain, x = session(tmp_path / "parent", *model, 2), floats(0, 4, WIDTH)
    want = run(chain, x)
    fork = multiprocessing.get_context("fork")
    done: multiprocessing.Queue[np.ndarray] = fork.Queue()
    child = fork.Process(target=_in_child, args=(tmp_path / "child", model, x, done))
    child.start()
    np.testing.assert_array_equal(done.get(timeout=60), want)
    child.join()
    np.testing.assert_array_equal(run(chain, x), want)


def test_a_links_error_names_it_and_the_session_goes_on(tmp_path: Path) -> None:
    nodes, constants = layers()
    constants["norm1"] = floats(0, WIDTH - 1)
    bad = session(tmp_path / "bad", nodes, constants, 2)
    for _ in range(3):
        with pytest.raises(Exception, match=r"spike\.RmsNorm 'c:3': w has shape \[255\]"):
            run(bad, floats(0, 2, WIDTH))
    good = session(tmp_path / "good", *layers(), 2)
    with pytest.raises(Exception, match=r"spike\.GatedMlp 'c:0': x has shape \[2, 255\]"):
        run(good, floats(0, 2, WIDTH - 1))
    assert np.isfinite(run(good, floats(0, 2, WIDTH))).all()


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("return %1", "no link"),
        ("%1 = Relu %0\nreturn %1", "there is no op 'Relu'"),
        ("%1 = RmsNorm %0 %0\nreturn %1", "'eps' is missing or no float"),
        ("%1 = RmsNorm %0 %0 eps=1e\nreturn %1", "'eps' is missing or no float"),
        ("%1 = RmsNorm %0 - eps=1\nreturn %1", "inputs and 1 outputs that don't fit"),
        ("%1 = RmsNorm %0 x0 eps=1\nreturn %1", "'x0' can't be read"),
        ("%1 = RmsNorm %2 %0 eps=1\n%2 = RmsNorm %1 %0 eps=1\nreturn %2", "%2 is read before"),
        ("%1 = RmsNorm %0 %0 eps=1\n%1 = RmsNorm %0 %0 eps=1\nreturn %1", "%1 is made twice"),
        ("%1 = RmsNorm %0 %0 eps=1\nreturn %0", "%0 is returned, but no link makes it"),
        ("%1 = RmsNorm %0 @0:f32[4] eps=1\nreturn %1", "at 0 of 16 bytes lies outside"),
        ("%1 = RmsNorm %0 @0:f16[4] eps=1\nreturn %1", r"'@0:f16\[4\]' can't be read"),
    ],
)
def test_texts_that_make_no_chain(links: str, message: str) -> None:
    node = helper.make_node("Chain", ["x"], ["y"], "c", domain="spike", links=links)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("spike", 1)]
    graph = helper.make_graph([node], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(ops_library()))
    with pytest.raises(Exception, match=message):
        ort.InferenceSession(model.SerializeToString(), options)
