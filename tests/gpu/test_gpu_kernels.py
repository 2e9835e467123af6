"""Every kernel of the example, launched through `load_kernels`, against NumPy."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import max_build
from max_build import load_settings, manifest, open_cache
from max_build.errors import LoadError
from max_build.packaging import manifest_of
from max_build.runtime.kernels import load_kernels
from max_build.target import native

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]

Note = Callable[[str, str], None]
Load = Callable[..., Path]


@pytest.fixture(scope="module")
def shipped(capability: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Build units of the example for given targets, into a folder as a wheel has it."""
    base = tmp_path_factory.mktemp("gpu")
    shutil.copytree(ROOT / "examples" / "kernels", base / "kernels")

    def ship(*units: str, targets: tuple[str, ...] = (str(native()),)) -> Path:
        settings = load_settings(base / "kernels").narrowed(units, targets)
        folder = base / "-".join(["wheel", *units, *targets])
        folder.mkdir(exist_ok=True)
        with open_cache(settings.cache) as cache:
            result = max_build.build(settings, cache)
            assert not result.failed, result.failed
            found = manifest_of(settings, result, "rowops")
            (folder / manifest.NAME).write_bytes(manifest.encode(found))
            for blob in found.blobs():
                shutil.copyfile(cache.path(blob), folder / manifest.file_name(blob))
        return folder

    return ship


class Array:
    """An array in device memory."""

    def __init__(self, values: np.ndarray, stream: Any) -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        self._driver, self._stream, self._like = driver, stream, values
        self.buffer = Device().allocate(values.nbytes, stream=stream)
        stream.sync()
        (status,) = driver.cuMemcpyHtoD(int(self.buffer.handle), values.ctypes.data, values.nbytes)
        assert status == driver.CUresult.CUDA_SUCCESS, status

    def read(self) -> np.ndarray:
        self._stream.sync()
        found = np.empty_like(self._like)
        (status,) = self._driver.cuMemcpyDtoH(
            found.ctypes.data, int(self.buffer.handle), found.nbytes
        )
        assert status == self._driver.CUresult.CUDA_SUCCESS, status
        return found


@pytest.mark.parametrize(
    ("name", "dtype", "exact", "tolerance"),
    [
        ("reduce<Sum, float>", np.float32, np.sum, 1e-5),
        ("reduce<Sum, double>", np.float64, np.sum, 1e-13),
        ("reduce<Max, float>", np.float32, np.max, 0.0),
    ],
)
def test_a_template_instance_reduces(
    shipped: Load, stream: Any, note: Note, name: str, dtype: type, exact: Any, tolerance: float
) -> None:
    kernels = load_kernels(shipped("reduce"), "reduce")
    x = np.random.default_rng(3).uniform(-1, 1, 100_003).astype(dtype) - dtype(0.25)
    blocks = 32
    out = Array(np.zeros(blocks, dtype), stream)
    kernels.launch(
        stream, name, blocks, Array(x, stream).buffer, out.buffer, np.int32(x.size), block=256
    )
    found = exact(out.read().astype(np.float64))
    np.testing.assert_allclose(found, exact(x.astype(np.float64)), rtol=tolerance)
    note(f"{name} for {kernels.target}", "agrees with NumPy")


@pytest.mark.parametrize("role", ["cubin", "ptx"])
def test_axpy_runs_from_machine_code_and_from_ptx(
    shipped: Load, stream: Any, note: Note, capability: tuple[int, int], role: str
) -> None:
    older = tuple(one for one in ("sm_75", "sm_80", "sm_90") if int(one[3:]) < 10 * capability[0])
    if role == "ptx" and not older:
        pytest.skip("no older architecture than this device's, to fall back from")
    folder = shipped("axpy") if role == "cubin" else shipped("axpy", targets=older[:1])
    kernels = load_kernels(folder, "axpy")
    assert kernels.role == role
    rng = np.random.default_rng(5)
    x, y = (rng.normal(size=1000).astype(np.float32) for _ in range(2))
    there = Array(y, stream)
    arguments = (np.float32(1.5), Array(x, stream).buffer, there.buffer, np.uint32(x.size))
    kernels.launch(stream, "axpy", 8, *arguments, block=128)
    np.testing.assert_allclose(there.read(), np.float32(1.5) * x + y, rtol=1e-6, atol=1e-6)
    note(f"axpy from {role} for {kernels.target}", "agrees with NumPy")


@pytest.mark.parametrize(("name", "columns"), [("softmax_256", 200), ("softmax_4096", 4001)])
def test_a_triton_specialisation_runs(
    shipped: Load, stream: Any, note: Note, name: str, columns: int
) -> None:
    try:
        folder = shipped("softmax")
    except max_build.errors.ConfigError as error:
        pytest.skip(f"Triton does not compile for this device: {error}")
    kernels = load_kernels(folder, "softmax")
    rows = 37
    x = np.random.default_rng(9).normal(0, 4, (rows, columns)).astype(np.float32)
    out = Array(np.zeros_like(x), stream)
    width = np.int32(columns)
    kernels.launch(stream, name, rows, out.buffer, Array(x, stream).buffer, width, width)
    exact = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out.read(), exact, atol=1e-6)
    note(f"{name} for {kernels.target}", "agrees with NumPy")


def test_code_for_another_device_is_refused_before_the_driver(
    shipped: Load, note: Note, capability: tuple[int, int]
) -> None:
    other = "sm_90a" if capability != (9, 0) else "sm_100a"
    with pytest.raises(LoadError, match=f"`{other}`: it runs on"):
        load_kernels(shipped("softmax", targets=(other,)), "softmax")
    note(f"code for {other}", "refused, with the reason")


def test_loading_takes_milliseconds(shipped: Load, stream: Any, note: Note) -> None:
    folder = shipped("reduce")
    started = time.perf_counter()
    kernels = load_kernels(folder, "reduce")
    kernels.warm()
    note("load 3 kernels into the device", f"{1000 * (time.perf_counter() - started):.1f} ms")
