"""Loading what was built: from a wheel's files, from an editable install, and what goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import max_build
from max_build.errors import LoadError, WeightsError
from max_build.runtime.select import Machine, choose
from max_build.weights.fingerprint import fingerprint
from support import run

X = np.arange(8, dtype=np.float32).reshape(2, 4)
BIAS = np.array([10, 20, 30, 40], np.float32)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "bias.safetensors"
    save_file({"bias": BIAS, "spare": np.zeros(3, np.float32)}, path)
    return path


@pytest.fixture
def site(project: Path, toy_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy wheel, unpacked where it can be imported, and a cache that knows nothing of it."""
    done = run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (project / "dist").glob("*.whl")
    unpacked = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.syspath_prepend(str(unpacked))
    return unpacked


def artifact(site: Path) -> Path:
    (found,) = (site / "toy" / "_max_build").glob("*.mef")
    return found


def test_the_wheel_alone_is_enough(site: Path, weights: Path) -> None:
    model = max_build.load("toy", weights=weights, device="cpu")
    (out,) = model(X)
    np.testing.assert_array_equal(out.to_numpy(), X * np.array([1, 2, 3, 4]) + BIAS)
    assert model.target == "cpu"
    assert "input0: float32['n', 4]" in repr(model)


def test_a_warm_model_gives_the_same(site: Path, weights: Path) -> None:
    for warm in (True, {"n": 3}):
        model = max_build.load("toy", weights=weights, device="cpu", warm=warm)
        np.testing.assert_array_equal(model(X)[0].to_numpy(), X * np.array([1, 2, 3, 4]) + BIAS)
    model.warm({"n": 7})


def test_a_model_that_cannot_be_warmed_says_why(site: Path, weights: Path) -> None:
    with pytest.raises(LoadError, match="`affine` has no dynamic dimension `m`; it has `n`"):
        max_build.load("toy", weights=weights, device="cpu", warm={"m": 3})
    with pytest.raises(LoadError, match=r"cannot be warmed by zeros of float32\[-1, 4\]: "):
        max_build.load("toy", weights=weights, device="cpu", warm={"n": -1})


def test_long_headers_of_weights_are_remembered_in_the_cache(
    site: Path, weights: Path, tmp_path: Path
) -> None:
    many = {f"spare.{n}": np.zeros(1, np.float32) for n in range(2000)}
    save_file({"bias": BIAS, **many}, weights)
    os.utime(weights, (1, 1))
    time.sleep(2.1)  # until its stamp can be believed
    max_build.load("toy", weights=weights, device="cpu")
    assert not (tmp_path / "empty").exists(), "a cache was made for it"
    (tmp_path / "empty").mkdir(mode=0o700)
    for _ in range(2):
        model = max_build.load("toy", weights=weights, device="cpu")
        np.testing.assert_array_equal(model(X)[0].to_numpy(), X * np.array([1, 2, 3, 4]) + BIAS)
        assert len(list((tmp_path / "empty" / "weights").iterdir())) == 2


def test_several_models_of_one_artifact_with_other_weights(site: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.safetensors" for n in range(2)]
    for n, path in enumerate(paths):
        save_file({"bias": np.full(4, n, np.float32)}, path)
    first, second = (max_build.load("toy", "affine", weights=path) for path in paths)
    zeros = np.zeros((1, 4), np.float32)
    assert first(zeros)[0].to_numpy().tolist() == [[0, 0, 0, 0]]
    assert second(zeros)[0].to_numpy().tolist() == [[1, 1, 1, 1]]


def test_weights_named_by_the_project_are_found_beside_the_package(
    site: Path, weights: Path
) -> None:
    shutil.copy(weights, site / "toy" / "bias.safetensors")
    assert max_build.load("toy")(X)[0].to_numpy().shape == (2, 4)


def test_a_manifest_can_be_named_by_its_path(site: Path, weights: Path) -> None:
    model = max_build.load(site / "toy" / "_max_build", weights=weights)
    assert model(X)[0].to_numpy().shape == (2, 4)


def test_weights_that_are_nowhere(site: Path) -> None:
    with pytest.raises(WeightsError, match=r"weights `bias.safetensors` are not there; looked at"):
        max_build.load("toy")
    with pytest.raises(WeightsError, match=r"package `nonesuch` is not installed"):
        max_build.load("toy", weights="nonesuch:model.safetensors")
    with pytest.raises(WeightsError, match=r"nobody has the home directory of `~no-such-user`"):
        max_build.load("toy", weights="~no-such-user/model.safetensors")
    with pytest.raises(WeightsError, match="cannot be looked at: File name too long"):
        max_build.load("toy", weights="w" * 300)


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({"bais": BIAS}, ["bias", "bais"]),
        ({"bias": BIAS.astype(np.float64)}, ["bias", "float32", "float64"]),
        ({"bias": BIAS[:2]}, ["bias", "[4]", "[2]"]),
    ],
)
def test_weights_that_do_not_fit_are_told_before_anything_is_loaded(
    site: Path, tmp_path: Path, tensors: dict[str, np.ndarray], parts: list[str]
) -> None:
    path = tmp_path / "other.safetensors"
    save_file(tensors, path)
    with pytest.raises(WeightsError) as caught:
        max_build.load("toy", weights=path)
    for part in parts:
        assert part in str(caught.value)


def test_the_wrong_weights_of_the_right_shape_are_refused_by_their_digest(
    site: Path, weights: Path, tmp_path: Path
) -> None:
    right = fingerprint(max_build.open_weights(weights)).total
    assert max_build.load("toy", weights=weights, weights_digest=right).target == "cpu"
    other = tmp_path / "other.safetensors"
    save_file({"bias": BIAS + 1, "spare": np.zeros(3, np.float32)}, other)
    with pytest.raises(WeightsError, match=r"not those asked for: `.*other\.safetensors`"):
        max_build.load("toy", weights=other, weights_digest=right)


def test_truncated_weights(site: Path, weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"bias\.safetensors"):
        max_build.load("toy", weights=weights)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_artifact_is_refused_or_taken_from_the_cache(
    site: Path, weights: Path, damage: str, monkeypatch: pytest.MonkeyPatch, compiled: Path
) -> None:
    path = artifact(site)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[1000] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises(LoadError, match=r"(is damaged|cannot be read).*the cache does not have it"):
        max_build.load("toy", weights=weights)
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(compiled))
    assert max_build.load("toy", weights=weights)(X)[0].to_numpy().shape == (2, 4)


def test_no_artifact_fits_and_each_is_told_why(site: Path, weights: Path) -> None:
    with pytest.raises(LoadError, match=r"device `gpu` is not there: this machine has 0 GPUs"):
        max_build.load("toy", weights=weights, device="gpu")
    manifest = site / "toy" / "_max_build" / "manifest.json"
    found = json.loads(manifest.read_text())
    targets = found["units"]["affine"]["targets"]
    targets["sm_90a"] = targets.pop("cpu")
    manifest.write_text(json.dumps(found))
    with pytest.raises(LoadError) as caught:
        max_build.load("toy", weights=weights)
    assert "`sm_90a`: it needs a GPU, and this machine has none" in str(caught.value)
    assert "add its target to `targets`" in str(caught.value)


def test_an_artifact_of_another_max_is_refused(site: Path, weights: Path) -> None:
    manifest = site / "toy" / "_max_build" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"max":"26.7.0+', '"max":"26.8.0+'))
    with pytest.raises(LoadError, match=r"compiled by MAX 26.8.0, and MAX 26.7.0 is installed"):
        max_build.load("toy", weights=weights)


@pytest.mark.parametrize(
    ("text", "part"),
    [("{", "is damaged"), ('{"schema": 9}', "has schema 9"), ('{"schema": 1}', "is damaged")],
)
def test_a_damaged_manifest(site: Path, text: str, part: str) -> None:
    (site / "toy" / "_max_build" / "manifest.json").write_text(text)
    with pytest.raises(LoadError, match=part):
        max_build.load("toy")


def test_a_unit_that_is_not_there(site: Path) -> None:
    with pytest.raises(LoadError, match="has no unit `encoder`; it has `affine`"):
        max_build.load("toy", "encoder")


def test_a_device_that_is_none() -> None:
    with pytest.raises(LoadError, match="device must be `auto`, `cpu`, `gpu`"):
        choose("affine", {}, Machine(), "cuda:0")


def test_loading_imports_no_compiler_and_no_package_of_the_user(
    site: Path, weights: Path, tmp_path: Path
) -> None:
    (site / "toy" / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    program = (
        "import sys, max_build\n"
        f"model = max_build.load('toy', weights={str(weights)!r}, device='cpu')\n"
        "unwanted = {'hatchling', 'diskcache', 'gguf', 'toy', 'max_build.pipeline'}\n"
        "print(sorted(unwanted & set(sys.modules)))\n"
    )
    done = run([sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": site})
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_an_editable_install_takes_its_artifacts_from_the_cache(
    project: Path, toy_cache: Path, weights: Path, tmp_path: Path
) -> None:
    shutil.copy(weights, project / "bias.safetensors")
    target = tmp_path / "target"
    install = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--target", str(target), "--editable", str(project)),
    ]
    before = sorted(project.rglob("*"))
    done = run(install, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(project.rglob("*")) == before, "the source tree was written to"
    program = (
        "import site, max_build\n"
        f"site.addsitedir({str(target)!r})\n"
        "import numpy as np\n"
        "print(max_build.load('toy')(np.ones((1, 4), np.float32))[0].to_numpy().tolist())\n"
    )
    done = run([sys.executable, "-c", program], cwd=tmp_path, env={"MAX_BUILD_STALE": "error"})
    assert done.stdout == "[[11.0, 22.0, 33.0, 44.0]]\n", done.stderr
    gone = run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"MAX_BUILD_CACHE_DIR": tmp_path / "no"}
    )
    assert "is in no tier of the cache" in gone.stderr
    assert f"run `max-build build` in `{project}`" in gone.stderr


def test_anonymous_memory_does_not_grow_with_the_weights(
    site: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "large.safetensors"
    save_file({"bias": BIAS, "spare": np.zeros(64 << 20, np.uint8)}, path)
    program = (
        "import max_build, numpy\n"
        "from max import driver, engine\n"
        "engine.InferenceSession(devices=[driver.CPU()])\n"
        "def anonymous():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(l.split()[1]) for l in lines if l.startswith('RssAnon'))\n"
        "before = anonymous()\n"
        f"model = max_build.load('toy', weights={str(path)!r}, device='cpu')\n"
        "print(anonymous() - before)\n"
    )
    done = run([sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": site})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20_000
