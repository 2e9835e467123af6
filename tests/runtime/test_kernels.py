"""`load_kernels` on a machine without a GPU: the choice, the checks, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import max_build
from kernel_repos import Repo, make, saxpy
from max_build import load_settings, manifest, open_cache
from max_build.errors import LoadError, NotBuiltError
from max_build.key import digest
from max_build.packaging import manifest_of
from max_build.runtime import devices
from max_build.runtime.kernels import load_kernels
from max_build.runtime.module import Kernels

pytest.importorskip("cuda.core", reason="cuda-core is not installed")

TEMPLATE = """
template <class T> __global__ void axpby(T a, const T* x, T b, T* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + b * y[i];
}
"""

no_driver = pytest.mark.skipif(
    devices.cuda_driver() is not None, reason="this machine has an NVIDIA driver"
)


def ship(repo: Repo, folder: Path) -> Path:
    """What a wheel has beside the package: the manifest and the artifacts."""
    settings = load_settings(repo.root)
    with open_cache(settings.cache) as cache:
        result = max_build.build(settings, cache)
        assert not result.failed, result
        shipped = manifest_of(settings, result, "repo")
        folder.mkdir(parents=True)
        (folder / manifest.NAME).write_bytes(manifest.encode(shipped))
        for blob in shipped.blobs():
            (folder / manifest.file_name(blob)).write_bytes(cache.path(blob).read_bytes())
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel module for three targets, with PTX."""
    base = tmp_path_factory.mktemp("wheel")
    table = (
        'source = "k.cu"\nkeep-ptx = true\nnames = ["axpby<float>", "axpby<double>"]\n'
        'targets = ["sm_80", "sm_90a", "sm_100f"]'
    )
    repo = make(base / "repo", {"k.cu": TEMPLATE}, {"axpby": table})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAX_BUILD_CACHE_DIR", str(base / "cache"))
        return ship(repo, base / "wheel")


@pytest.mark.parametrize(
    ("device", "target", "role"),
    [
        ("sm_80", "sm_80", "cubin"),
        ("sm_86", "sm_80", "cubin"),
        ("sm_89", "sm_80", "cubin"),
        ("sm_90", "sm_90a", "cubin"),
        ("sm_100", "sm_100f", "cubin"),
        ("sm_103", "sm_100f", "cubin"),
        ("sm_120", "sm_80", "ptx"),
        ("sm_110", "sm_80", "ptx"),
    ],
)
def test_the_artifact_that_the_device_runs_is_chosen(
    wheel: Path, device: str, target: str, role: str
) -> None:
    kernels = load_kernels(wheel, device=device)
    assert isinstance(kernels, Kernels)
    assert (kernels.target, kernels.role) == (target, role)
    assert set(kernels) == {"axpby<float>", "axpby<double>"}


def test_a_device_that_nothing_runs_on_is_refused_with_each_reason(wheel: Path) -> None:
    with pytest.raises(LoadError) as caught:
        load_kernels(wheel, device="sm_75")
    text = str(caught.value)
    for part in ("`sm_80`", "`sm_90a`", "`sm_100f`", "PTX of `sm_80`", "7.5"):
        assert part in text
    assert text.startswith("no artifact of `axpby` runs on a device of sm_75:")


def ptx_wheel(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module whose comment names a version and a target that nothing here has."""
    text = (
        "/*\n.version 100.0\n.target sm_999\n*/\n.version 7.0\n.target sm_70\n"
        ".address_size 64\n.visible .entry nothing() { ret; }\n"
    )
    table = 'source = "k.ptx"\nkeep-ptx = true\ntargets = ["sm_80"]'
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(base / "cache"))
    return ship(make(base / "repo", {"k.ptx": text}, {"nothing": table}), base / "wheel")


def test_what_ptx_says_in_a_comment_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = load_kernels(ptx_wheel(tmp_path, monkeypatch), device="sm_120")
    assert (kernels.target, kernels.role) == ("sm_80", "ptx")


def test_ptx_that_is_none_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ptx_wheel(tmp_path, monkeypatch)
    stated = json.loads((folder / manifest.NAME).read_bytes())
    record = stated["units"]["nothing"]["targets"]["sm_80"]
    (blob,) = (one for one in record["blobs"] if one["role"] == "ptx")
    data = b"no PTX"
    blob.update(digest=digest(data), size=len(data))
    (folder / manifest.NAME).write_text(json.dumps(stated))
    (folder / f"{blob['digest']}.ptx").write_bytes(data)
    with pytest.raises(LoadError, match=r"PTX of `sm_80`: .* is not PTX: it has no `\.version`"):
        load_kernels(folder, device="sm_120")


def test_source_level_names_lead_to_the_code(wheel: Path) -> None:
    kernels = load_kernels(wheel, device="sm_90")
    code = kernels.code("axpby<double>")
    assert code.code_type == "cubin"
    assert code.symbol_mapping["axpby<double>"] == kernels.needs("axpby<double>").lowered
    assert kernels.code("axpby<float>") is code


def test_a_launch_configuration_asks_for_what_is_missing(wheel: Path) -> None:
    kernels = load_kernels(wheel, device="sm_90")
    with pytest.raises(LoadError, match="give `block`"):
        kernels.config("axpby<float>", 1)
    assert kernels.config("axpby<float>", 4, 128).block == (128, 1, 1)
    with pytest.raises(LoadError, match="`axpby<float>`"):
        kernels.needs("axpby<half>")


@no_driver
@pytest.mark.parametrize("device", ["auto", "gpu", "gpu:1"])
def test_without_a_driver_all_is_checked_and_the_driver_is_named(wheel: Path, device: str) -> None:
    with pytest.raises(LoadError) as caught:
        load_kernels(wheel, "axpby", device=device)
    text = str(caught.value)
    assert "libcuda.so.1" in text
    for target in ("`sm_80`", "`sm_90a`", "`sm_100f`"):
        assert target in text


@no_driver
def test_a_kernel_chosen_for_a_device_elsewhere_cannot_be_loaded_here(wheel: Path) -> None:
    kernels = load_kernels(wheel, device="sm_90")
    with pytest.raises(LoadError, match="libcuda"):
        kernels["axpby<float>"]


@pytest.mark.parametrize("device", ["sm_90", "auto"])
def test_a_damaged_artifact_is_told_before_any_driver_is_asked(
    wheel: Path, tmp_path: Path, device: str
) -> None:
    folder = tmp_path / "wheel"
    folder.mkdir()
    for path in wheel.iterdir():
        data = path.read_bytes()
        (folder / path.name).write_bytes(data[:-1] if path.suffix == ".cubin" else data)
    with pytest.raises(LoadError, match="damaged"):
        load_kernels(folder, device=device)


def test_a_record_that_promises_another_kernel_is_told(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wheel"
    folder.mkdir()
    for path in wheel.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    text = json.loads((folder / manifest.NAME).read_bytes())
    record = text["units"]["axpby"]["targets"]["sm_90a"]
    record["kernels"]["axpby<float>"]["lowered"] = "elsewhere"
    (folder / manifest.NAME).write_text(json.dumps(text))
    with pytest.raises(LoadError, match="elsewhere"):
        load_kernels(folder, device="sm_90")


def test_what_is_asked_for_wrongly_is_told(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="device must be"):
        load_kernels(wheel, device="cuda")
    with pytest.raises(LoadError, match="has no unit `other`"):
        load_kernels(wheel, "other")
    with pytest.raises(NotBuiltError, match="is not installed"):
        load_kernels("no_such_package_at_all")
    with pytest.raises(LoadError, match="is a kernel module"):
        max_build.load(wheel)


def test_several_cubins_of_one_unit_are_told_apart(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    kernel = (
        "import triton\nimport triton.language as tl\n\n@triton.jit\n"
        "def scale(x, n, BLOCK: tl.constexpr):\n"
        "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)\n"
    )
    table = (
        'entry = "repo.k:scale"\nsignature = { x = "*fp32", n = "i32" }\n'
        "[tool.max-build.kernels.scale.specialisations]\n"
        "small = { constexprs = { BLOCK = 64 }, num-warps = 2 }\n"
        "large = { constexprs = { BLOCK = 1024 }, num-warps = 8 }\n"
    )
    repo = make(tmp_path / "repo", {"repo/__init__.py": "", "repo/k.py": kernel}, {"scale": table})
    kernels = load_kernels(ship(repo, tmp_path / "wheel"), device="sm_90")
    small, large = kernels.code("small"), kernels.code("large")
    assert small is not large
    assert (small.symbol_mapping, large.symbol_mapping) == ({"small": "scale"}, {"large": "scale"})
    assert kernels.config("large", (7, 1, 1)).block == (256, 1, 1)
    with pytest.raises(LoadError, match=r"takes 2 arguments \(\*fp32, i32\), got 1"):
        kernels.launch(None, "small", 1, 0)


def test_an_editable_install_finds_its_cubins_in_the_cache(tmp_path: Path) -> None:
    repo = saxpy(tmp_path / "repo")
    folder = ship(repo, tmp_path / "wheel")
    for path in folder.glob("*.cubin"):
        path.unlink()
    assert load_kernels(folder, device="sm_90").target == "sm_90a"
