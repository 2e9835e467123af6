"""Hand-over to MAX, NumPy and torch: the same memory, the same type."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from weights_files import BITS, Gguf, entry, payload, safetensors

from max_build.weights import Tensor, Weights, open_weights
from max_build.weights.device import deliver, device_buffers, host_buffers

driver = pytest.importorskip("max.driver")
SHAPE = [2, 4]


def every_dtype(path: Path) -> Weights:
    """One tensor of each type, widest first, so that each lies aligned."""
    header, end = {}, 0
    for dtype in sorted(BITS, key=BITS.__getitem__, reverse=True):
        header[dtype], end = entry(dtype, SHAPE, end)
    header["empty"], end = entry("F32", [0, 3], end)
    header["odd"], end = entry("U8", [1], end)
    header["misaligned"], end = entry("F32", [3], end)
    text = json.dumps(header)
    path.write_bytes(safetensors(text.encode(), payload(end), pad=b" " * (-len(text) % 64 + 56)))
    return open_weights(path)


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return every_dtype(tmp_path / "all.safetensors")


def known(weights: Weights) -> dict[str, object]:
    """Those that MAX has a type for."""
    return {name: tensor for name, tensor in weights.items() if tensor.dtype != "complex64"}


def test_max_buffers_alias_the_mapping(weights: Weights) -> None:
    for buffers in (
        host_buffers(known(weights)),
        {name: driver.Buffer.from_dlpack(tensor) for name, tensor in known(weights).items()},
    ):
        for name, buffer in buffers.items():
            tensor = weights[name]
            expected = "uint8" if tensor.type.packed else tensor.dtype
            assert buffer.dtype.name == expected
            assert tuple(buffer.shape) == tensor.raw_shape
            if name not in ("empty", "misaligned"):
                assert buffer._data_ptr() == tensor.writable().ctypes.data
                assert buffer._data_ptr() % 4096 == tensor.offset % 4096


def test_max_buffers_hold_the_bytes(weights: Weights) -> None:
    from max.dtype import DType

    for name, buffer in host_buffers(known(weights)).items():
        if weights[name].nbytes:
            raw = buffer.view(DType.uint8, [weights[name].nbytes]).to_numpy()
            assert raw.tobytes() == weights[name].tobytes()


def test_max_buffers_alias_an_arena_too(tmp_path: Path) -> None:
    every_dtype(tmp_path / "all.safetensors")
    weights = open_weights(tmp_path / "all.safetensors", mode="read")
    for name, buffer in host_buffers({n: weights[n] for n in ("F32", "BF16", "I64")}).items():
        assert buffer._data_ptr() == weights[name].writable().ctypes.data
        assert weights[name].file.is_read


def test_max_buffers_keep_the_mapping(tmp_path: Path) -> None:
    weights = every_dtype(tmp_path / "y.safetensors")
    expected = weights["F32"].tobytes()
    buffer = host_buffers({"F32": weights["F32"]})["F32"]
    del weights
    assert buffer.to_numpy().tobytes() == expected


def test_delivery_by_the_plan_gives_the_same(weights: Weights) -> None:
    """With MAX's CPU in the place of an accelerator."""
    from max.dtype import DType

    wanted = known(weights)
    wanted["tied"] = wanted["F32"]
    seen: list[tuple[int, int]] = []
    buffers = device_buffers(wanted, driver.CPU(), lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1] >= sum(t.nbytes for t in known(weights).values())
    assert buffers["tied"]._data_ptr() == buffers["F32"]._data_ptr()
    for name, buffer in buffers.items():
        tensor = wanted[name]
        assert buffer.dtype.name == ("uint8" if tensor.type.packed else tensor.dtype)
        assert tuple(buffer.shape) == tensor.raw_shape
        if tensor.nbytes:
            raw = buffer.view(DType.uint8, [tensor.nbytes]).to_numpy()
            assert raw.tobytes() == tensor.tobytes()


def test_each_device_of_a_graph_gets_its_own(weights: Weights) -> None:
    """With MAX's CPU in the place of both."""
    names = ["F32", "I64", "empty", "U8"]
    places = dict(zip(names, ["gpu:1", "cpu", "gpu:0", "gpu:1"], strict=True))
    devices = dict.fromkeys(["cpu", "gpu:0", "gpu:1"], driver.CPU())
    found = deliver({name: weights[name] for name in names}, places, devices)
    assert sorted(found) == sorted(names)
    for name in names:
        assert found[name].to_numpy().tobytes() == weights[name].tobytes()
    aliased = {n for n in ("F32", "I64", "U8") if found[n]._data_ptr() == address(weights[n])}
    assert aliased == {"I64"}


def address(tensor: Tensor) -> int:
    return tensor.writable().ctypes.data


def test_quantised_blocks_are_bytes_to_max(tmp_path: Path) -> None:
    path = tmp_path / "q.gguf"
    path.write_bytes(Gguf().tensor("w", [64, 3], 2, payload(108)).build())
    weights = open_weights(path)
    buffer = host_buffers(weights)["w"]
    assert (buffer.dtype.name, tuple(buffer.shape)) == ("uint8", (3, 36))
    assert buffer._data_ptr() == weights["w"].writable().ctypes.data


def test_numpy_takes_views(weights: Weights) -> None:
    for name, tensor in weights.items():
        if not tensor.type.native:
            continue
        for array in (np.asarray(tensor), np.from_dlpack(tensor), tensor.numpy()):
            assert array.tobytes() == tensor.tobytes()
            assert array.shape == tensor.shape
            if name not in ("empty", "misaligned"):
                assert array.ctypes.data == tensor.writable().ctypes.data
        copied = np.from_dlpack(tensor, copy=True)
        assert copied.tobytes() == tensor.tobytes()


def test_a_stream_or_device_is_refused(weights: Weights) -> None:
    with pytest.raises(BufferError, match="no stream"):
        weights["F32"].__dlpack__(dl_device=(2, 0))
    assert weights["F32"].__dlpack_device__() == (1, 0)


def test_torch_takes_views_of_the_true_type(weights: Weights) -> None:
    torch = pytest.importorskip("torch")
    kinds = {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "I64": torch.int64,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "C64": torch.complex64,
    }
    for name, kind in kinds.items():
        tensor = torch.from_dlpack(weights[name])
        assert (tensor.dtype, tuple(tensor.shape)) == (kind, tuple(SHAPE))
        assert tensor.data_ptr() == weights[name].writable().ctypes.data


@pytest.mark.slow
def test_a_session_takes_a_gigabyte_without_a_copy(tmp_path: Path) -> None:
    """On the host, `init` adds less than 20 MB of anonymous memory, whatever the size."""
    rows = 64 << 10
    header = {"w": entry("F32", [rows, 4096], 0)[0]}
    path = tmp_path / "w.safetensors"
    text = json.dumps(header).encode()
    content = safetensors(text, pad=b" " * (-len(text) % 64 + 56))
    with path.open("wb") as stream:
        stream.write(content)
        for _ in range(64):
            stream.write(np.ones(4 << 20, np.float32).tobytes())
    code = f"""
        import sys
        import numpy as np
        from max import driver, engine
        from max.dtype import DType
        from max.graph import DeviceRef, Graph, TensorType, Weight, ops
        from max_build.weights import open_weights
        from max_build.weights.device import host_buffers

        def anonymous():
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

        cpu = DeviceRef.CPU()
        with Graph("g", input_types=[TensorType(DType.float32, [1, 4096], cpu)]) as graph:
            w = Weight("w", DType.float32, [{rows}, 4096], cpu)
            graph.output(ops.matmul(graph.inputs[0].tensor, ops.transpose(w[:4], 0, 1)))
        session = engine.InferenceSession(devices=[driver.CPU()])
        compiled = session.compile(graph)
        before = anonymous()
        weights = open_weights(sys.argv[1])
        model = session.init(compiled, weights_registry=host_buffers(weights))
        print(anonymous() - before)
        x = np.ones((1, 4096), np.float32)
        print(float(model.execute(x)[0].to_numpy()[0, 0]))
        sys.stdout.flush()
        import os
        os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kilobytes, value = done.stdout.split()
    assert float(value) == 4096.0
    assert int(kilobytes) < 20_000
