"""Weights on the GPU: the file's bytes, through the ring and through cuFile, and how fast."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import max_build
from max_build.weights import Weights, cuda_buffers, gds
from max_build.weights.device import device_buffers
from max_build.weights.plan import make_plan
from max_build.weights.sinks import CudaSink

pytestmark = pytest.mark.gpu

Note = Callable[[str, str], None]
MIB = 1 << 20


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """256 MiB in tensors of many sizes, most of them at odd offsets."""
    rng = np.random.default_rng(11)
    sizes = [*rng.integers(1, 5000, 200).tolist(), *rng.integers(MIB, 9 * MIB, 50).tolist()]
    header, end = {}, 0
    for number, size in enumerate(sizes):
        header[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + rng.bytes(end))
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    return max_build.open_weights(path)


def read(address: int, nbytes: int) -> bytes:
    from cuda.bindings import driver

    found = np.empty(nbytes, np.uint8)
    (status,) = driver.cuMemcpyDtoH(found.ctypes.data, address, nbytes)
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return found.tobytes()


def speed(weights: Weights, begun: float) -> str:
    return f"{weights.nbytes / (time.perf_counter() - begun) / 1e9:.1f} GB/s, bytes are the file's"


def test_kernels_get_the_bytes_of_the_file(weights: Weights, stream: Any, note: Note) -> None:
    wanted = {**weights, "tied": weights["t7"]}
    cuda_buffers({"t0": weights["t0"]})
    begun = time.perf_counter()
    found = cuda_buffers(wanted)
    note("weights to cuda.core", speed(weights, begun))
    for name, tensor in wanted.items():
        assert int(found[name].handle) % 256 == 0
        assert read(int(found[name].handle), found[name].size) == tensor.tobytes()
    assert int(found["tied"].handle) == int(found["t7"].handle)


def test_max_gets_the_bytes_of_the_file(
    weights: Weights, capability: tuple[int, int], note: Note
) -> None:
    driver = pytest.importorskip("max.driver", reason="MAX is not installed")
    device = driver.Accelerator(0)
    device_buffers({"t0": weights["t0"]}, device)
    begun = time.perf_counter()
    found = device_buffers(weights, device)
    note("weights to MAX", speed(weights, begun))
    for name, buffer in found.items():
        assert buffer.to(driver.CPU()).to_numpy().tobytes() == weights[name].tobytes()


def test_cufile_reads_the_same(weights: Weights, stream: Any, note: Note) -> None:
    """Also where it is not asked for; where it cannot be used, the reason is told."""
    reason = gds.gds_reason(weights.files[0])
    if reason and gds.VARIABLE not in reason:
        note("weights by cuFile", f"not here: {reason}")
        pytest.skip(reason)
    plan = make_plan(weights)
    sink = CudaSink(plan)
    begun = time.perf_counter()
    gds.fill(plan, [int(arena.handle) for arena in sink.arenas], 0)
    note("weights by cuFile", speed(weights, begun))
    for name, (arena, offset, nbytes) in plan.places.items():
        address = int(sink.arenas[arena].handle) + offset
        assert read(address, nbytes) == weights[name].tobytes()


def test_where_cufile_cannot_the_ring_does(
    weights: Weights, stream: Any, monkeypatch: pytest.MonkeyPatch, note: Note
) -> None:
    monkeypatch.setenv(gds.VARIABLE, "1")
    some = {name: weights[name] for name in ("t1", "t220")}
    found = cuda_buffers(some)
    for name, tensor in some.items():
        assert read(int(found[name].handle), found[name].size) == tensor.tobytes()
    note("MAX_BUILD_GDS=1", gds.gds_reason(weights.files[0]) or "cuFile is used")
