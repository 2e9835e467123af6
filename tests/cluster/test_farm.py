"""Compiling on a real Dask farm: a scheduler and two workers on loopback, killed at will."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from max_build import load_settings, open_cache
from max_build.cluster import dask_farm
from max_build.cluster.farmhand import Answer, Task, compile_one
from max_build.compilers.cuda_libraries import NVRTC
from max_build.config import Settings
from max_build.errors import ConfigError, ToolchainError
from max_build.outcomes import Build, Event
from max_build.pipeline import build
from max_build.record import Blob
from support import write_project

pytest.importorskip("distributed", reason="needs Dask (`max-build[cluster]`)")

import farms

SAXPY = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
"""

# Seconds of NVRTC's time, for a worker to be killed in.
SLOW = """
template <int N> struct Deep { static __device__ float f(float x) {
  #pragma unroll
  for (int i = 0; i < 24; ++i) x = x * (N + i) + __sinf(x);
  return Deep<N - 1>::f(x); } };
template <> struct Deep<0> { static __device__ float f(float x) { return x; } };
extern "C" __global__ void slow(float* x) { x[threadIdx.x] = Deep<DEPTH>::f(x[threadIdx.x]); }
"""


@pytest.fixture(scope="module", autouse=True)
def _nvrtc() -> None:
    try:
        NVRTC.load()
    except ToolchainError as error:
        pytest.skip(f"needs NVRTC: {error.message}")


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """The team's directory, which is all that the farm and this machine share."""
    path = tmp_path / "team"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def _looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_farm, "_LOOK", 0.3)


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[farms.Farm]:
    """A farm to break."""
    with farms.farm(tmp_path / "farm") as found:
        yield found


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[farms.Farm]:
    """Two workers that are left alone."""
    with farms.farm(tmp_path_factory.mktemp("farm")) as found:
        found.worker("one")
        found.worker("two")
        waiting(found, 2)
        yield found


def kernels(root: Path, team: Path, units: dict[str, str], extra: str = "") -> Path:
    """A project of kernel modules: name → source."""
    root.mkdir(exist_ok=True)
    lines = ['[project]\nname = "kernels"\nversion = "1"\n[tool.max-build]\ntargets = ["sm_90a"]']
    for name, source in units.items():
        (root / f"{name}.cu").write_text(source)
        lines.append(f'[tool.max-build.kernels.{name}]\nsource = "{name}.cu"\n{extra}')
    lines.append(f'[tool.max-build.cache]\nshared = "{team}"')
    (root / "pyproject.toml").write_text("\n".join(lines))
    return root


def settings_of(root: Path, address: str, **cache: Any) -> Settings:
    address = address.replace("tcp://", "dask://") or "local"
    found = load_settings(root, flags={"executor": address})
    return msgspec.structs.replace(found, cache=msgspec.structs.replace(found.cache, **cache))


def built(settings: Settings) -> tuple[Build, list[str], list[Event]]:
    """The build, the cache's warnings, and what was told."""
    told: list[Event] = []
    with open_cache(settings.cache) as cache:
        return build(settings, cache, report=told.append), cache.warnings, told


def waiting(farm: farms.Farm, count: int) -> None:
    """Wait until so many workers have registered."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        registered = sum("Registered to" in farm.log(name) for name in farm.workers)
        if registered >= count:
            return
        time.sleep(0.05)
    raise AssertionError([farm.log(name) for name in farm.workers])


# --- what it is for


def test_misses_compile_on_the_farm_and_come_through_the_shared_cache(
    standing: farms.Farm, tmp_path: Path, team: Path
) -> None:
    units = {f"k{n}": SAXPY.replace("a * x", f"{n} + a * x") for n in range(6)}
    root = kernels(tmp_path / "repo", team, units)
    result, warnings, told = built(settings_of(root, standing.address))
    assert warnings == []
    assert [one.state for one in result.outcomes] == ["compiled"] * 6
    assert {one.where.partition(" ")[2] for one in result.outcomes} == {"(one)", "(two)"}
    assert all(one.reason == "never compiled before" for one in result.outcomes)
    assert not any(event.what == "deriving" for event in told), "this machine compiled too"

    # the same bytes as from a compile of one's own
    alone = msgspec.structs.replace(
        load_settings(root), cache=msgspec.structs.replace(load_settings(root).cache, shared="")
    )
    alone = msgspec.structs.replace(
        alone, cache=msgspec.structs.replace(alone.cache, dir=str(tmp_path / "alone"))
    )
    own, _, _ = built(alone)
    for mine, theirs in zip(own.outcomes, result.outcomes, strict=True):
        assert mine.record is not None
        assert theirs.record is not None
        assert mine.key == theirs.key
        assert mine.record.blobs == theirs.record.blobs

    # a changed unit alone goes there again, and is told by what this machine knows
    (root / "k3.cu").write_text(SAXPY.replace("a * x", "7 - a * x"))
    again, _, _ = built(settings_of(root, standing.address))
    assert [one.state for one in again.outcomes].count("compiled") == 1
    assert again.outcomes[3].reason == "`source` changed"


def test_a_build_that_hits_never_asks_the_farm(tmp_path: Path, team: Path) -> None:
    root = kernels(tmp_path / "repo", team, {"k": SAXPY})
    assert [one.state for one in built(load_settings(root))[0].outcomes] == ["compiled"]
    result, warnings, _ = built(settings_of(root, "dask://127.0.0.1:9"))
    assert ([one.state for one in result.outcomes], warnings) == (["cached"], [])


# --- what goes wrong


def test_a_worker_killed_in_a_compile_loses_nothing(
    farm: farms.Farm, tmp_path: Path, team: Path
) -> None:
    farm.worker("one")
    farm.worker("two")
    waiting(farm, 2)
    units = {f"k{n}": SLOW.replace("DEPTH", str(70 + n)) for n in range(4)}
    settings = settings_of(kernels(tmp_path / "repo", team, units), farm.address, lease=2.0)
    found: list[Build] = []
    thread = threading.Thread(target=lambda: found.append(built(settings)[0]))
    thread.start()
    victim = farm.compiling()
    farm.kill(victim)
    thread.join(timeout=240)
    (result,) = found
    assert [one.state for one in result.outcomes] == ["compiled"] * 4
    survivor = {"one": "(two)", "two": "(one)"}[victim]
    assert any(one.where.endswith(survivor) for one in result.outcomes)
    with open_cache(msgspec.structs.replace(settings.cache, dir=str(tmp_path / "third"))) as cache:
        again = build(msgspec.structs.replace(settings, executor="local"), cache)
    assert [(one.state, one.tier) for one in again.outcomes] == [("cached", "shared")] * 4
    assert not list(team.glob("tmp/*")), "a killed writer's file would be a later gc's"


@pytest.mark.slow
def test_without_any_worker_left_the_rest_is_compiled_here(
    farm: farms.Farm, tmp_path: Path, team: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_farm, "_PATIENCE", 1.0)
    farm.worker("one")
    waiting(farm, 1)
    units = {f"k{n}": SLOW.replace("DEPTH", str(90 + n)) for n in range(2)}
    settings = settings_of(kernels(tmp_path / "repo", team, units), farm.address, lease=2.0)
    found: list[tuple[Build, list[str], list[Event]]] = []
    thread = threading.Thread(target=lambda: found.append(built(settings)))
    thread.start()
    farm.kill(farm.compiling())
    thread.join(timeout=240)
    ((result, warnings, _),) = found
    assert [one.state for one in result.outcomes] == ["compiled"] * 2
    assert any(one.where == "" for one in result.outcomes)
    assert any("no worker of the farm can compile with `cuda` any more" in one for one in warnings)


@pytest.mark.slow
def test_a_scheduler_that_dies_leaves_the_rest_to_this_machine(
    farm: farms.Farm, tmp_path: Path, team: Path
) -> None:
    farm.worker("one")
    waiting(farm, 1)
    units = {f"k{n}": SLOW.replace("DEPTH", str(60 + n)) for n in range(3)}
    settings = settings_of(kernels(tmp_path / "repo", team, units), farm.address, lease=2.0)
    found: list[tuple[Build, list[str], list[Event]]] = []
    thread = threading.Thread(target=lambda: found.append(built(settings)))
    thread.start()
    farm.compiling()
    farm.scheduler.kill()
    thread.join(timeout=240)
    ((result, warnings, _),) = found
    assert {one.state for one in result.outcomes} <= {"compiled", "cached"}
    assert result.outcomes[-1].where == ""
    assert any("the farm" in one for one in warnings)


@pytest.mark.slow
def test_an_interrupted_build_ends_at_once(farm: farms.Farm, tmp_path: Path, team: Path) -> None:
    farm.worker("one")
    waiting(farm, 1)
    units = {f"k{n}": SLOW.replace("DEPTH", str(150 + n)) for n in range(3)}
    root = kernels(tmp_path / "repo", team, units)
    address = farm.address.replace("tcp", "dask")
    process = subprocess.Popen(
        [sys.executable, "-m", "max_build", "build", "--executor", address],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    farm.compiling()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said


def test_what_the_farm_cannot_see_is_compiled_here_and_said(
    standing: farms.Farm, tmp_path: Path, team: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "scale.cuh").write_text("#define SCALE 2.0f\n")
    source = '#include <scale.cuh>\nextern "C" __global__ void k(float* x) { x[0] *= SCALE; }\n'
    root = kernels(tmp_path / "repo", team, {"k": source}, 'include-dirs = ["../outside"]')
    result, warnings, _ = built(settings_of(root, standing.address))
    (outcome,) = result.outcomes
    assert (outcome.state, outcome.where) == ("compiled", "")
    (warning,) = warnings
    assert warning.startswith("`k` × `sm_90a` was left to this machine: ")
    assert "scale.cuh" in warning


def test_a_unit_that_cannot_be_compiled_fails_as_it_does_here(
    standing: farms.Farm, tmp_path: Path, team: Path
) -> None:
    root = kernels(tmp_path / "repo", team, {"k": "__global__ void k() { nonsense<3>; }\n"})
    result, warnings, _ = built(settings_of(root, standing.address))
    (outcome,) = result.outcomes
    assert outcome.state == "failed"
    assert "nonsense" in str(outcome.error)
    assert str(tmp_path) not in str(outcome.error)
    assert warnings == []


def test_what_cannot_be_kept_goes_to_the_farm_once_at_most(
    standing: farms.Farm, tmp_path: Path, team: Path
) -> None:
    source = 'extern "C" __global__ void k(char* x) { x[0] = __TIME__[0]; }\n'
    settings = settings_of(kernels(tmp_path / "repo", team, {"k": source}), standing.address)
    sent = []
    for _ in range(2):
        result, _, told = built(settings)
        assert [one.state for one in result.outcomes] == ["uncached"]
        sent.append(any(event.reason.startswith("sent to the farm") for event in told))
    assert sent == [True, False]


# --- what is asked for first


def left_out(settings: Settings) -> str:
    """The warning of a build that went on without its farm."""
    result, warnings, _ = built(settings)
    assert [(one.state, one.where) for one in result.outcomes] == [("compiled", "")]
    (warning,) = (one for one in warnings if one.startswith("the farm is left out: "))
    return warning


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ("", "set `shared` (`MAX_BUILD_SHARED`) or `remote` (`MAX_BUILD_REMOTE`)"),
        ('shared = "/no/such/folder"', "shared cache directory `/no/such/folder` is left out"),
        ('shared = "TEAM"\nshared-mode = "read"', "it may only read"),
        ('remote = "file://TEAM"', 'set `remote-mode = "read-write"` (`MAX_BUILD_REMOTE_MODE`)'),
    ],
)
def test_a_cache_to_share_is_needed(tmp_path: Path, team: Path, cache: str, said: str) -> None:
    root = kernels(tmp_path / "repo", team, {"k": SAXPY})
    text = (root / "pyproject.toml").read_text().partition("[tool.max-build.cache]")[0]
    cache = cache.replace("TEAM", str(team))
    (root / "pyproject.toml").write_text(f"{text}[tool.max-build.cache]\n{cache}\n")
    warning = left_out(settings_of(root, "dask://127.0.0.1:9"))
    assert "an executor needs a" in warning
    assert said in warning


@pytest.mark.parametrize(
    "address",
    [
        *("ray://head:1", "127.0.0.1:8786", "dask://", "dask://head", "dask://head:", "dask://:1"),
        *("dask://head:65536", "dask://head:port", "dask://head:1/x", "dask://::1:8786"),
        *("dask://user@head:1", "dask://a b:1"),
    ],
)
def test_an_address_of_another_kind_is_an_error(tmp_path: Path, team: Path, address: str) -> None:
    root = kernels(tmp_path / "repo", team, {"k": SAXPY})
    with pytest.raises(ConfigError, match="executor` must be `local` or `dask://HOST:PORT`"):
        built(settings_of(root, address))


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "no-such-host.invalid"])
def test_without_its_scheduler_a_build_goes_on(
    tmp_path: Path, team: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(dask_farm, "_CONNECT", 1.0)
    root = kernels(tmp_path / "repo", team, {"k": SAXPY})
    warning = left_out(settings_of(root, f"dask://{host}:9"))
    assert f"executor `dask://{host}:9` does not answer over tcp" in warning
    assert "is the scheduler up?" in warning


def test_a_farm_that_does_not_fit_is_left_out(farm: farms.Farm, tmp_path: Path, team: Path) -> None:
    root = kernels(tmp_path / "repo", team, {"k": SAXPY})
    farm.worker("wrong", "max=1")
    waiting(farm, 1)
    warning = left_out(settings_of(root, farm.address))
    assert "no worker of the farm declares the compiler `cuda`" in warning
    assert '--resources "cuda=2"' in warning
    other = tmp_path / "other" / "max_build-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: max-build\nVersion: 9.9\n")
    farm.worker("newer", "cuda=1", PYTHONPATH=str(tmp_path / "other"))
    waiting(farm, 2)
    (root / "k.cu").write_text(SAXPY.replace("a * x", "9 + a * x"))
    assert "has max-build 9.9, this machine" in left_out(settings_of(root, farm.address))


def test_python_outside_of_the_project_does_not_travel(tmp_path: Path, team: Path) -> None:
    root = kernels(tmp_path / "repo", team, {"k": SAXPY})
    settings = settings_of(root, "dask://127.0.0.1:9")
    settings = msgspec.structs.replace(settings, python_path=(str(tmp_path / "lib"),))
    warning = left_out(settings)
    assert f"`python-path` names `{tmp_path / 'lib'}`, which lies outside" in warning


def test_memory_is_counted_where_every_worker_counts_it() -> None:
    counted = {"resources": {"cuda": 1, "memory": 8e9}}
    assert dask_farm._resources("cuda", [counted]) == {"cuda": 1, "memory": 2 << 30}
    assert dask_farm._resources("cuda", [counted, {"resources": {"cuda": 1}}]) == {"cuda": 1}


def test_no_path_and_no_password_of_this_machine_is_sent(tmp_path: Path, team: Path) -> None:
    root = kernels(tmp_path / "repo", team, {"k": SAXPY})
    settings = settings_of(
        root, "", remote="https://ci:s3cret@cache/", remote_key="/k.pem", signing_key="/s.key"
    )
    sent = msgspec.json.encode(dask_farm._portable(settings)).decode()
    assert "s3cret" not in sent
    assert ".pem" not in sent
    assert ".key" not in sent
    assert str(root) not in sent


# --- the worker's side alone


def test_a_task_of_another_version_or_without_sources_is_answered(
    tmp_path: Path, team: Path
) -> None:
    settings = dask_farm._portable(settings_of(kernels(tmp_path / "repo", team, {"k": SAXPY}), ""))
    blob = Blob(role="sources", digest="0" * 64, size=3)
    for version, said in (("0.0", "was asked by 0.0"), (dask_farm.version(), "000000000000")):
        task = msgspec.json.encode(Task(version, settings, blob))
        answer = msgspec.json.decode(compile_one(task), type=Answer)
        assert answer.state == "failed"
        assert said in answer.error
    answer = msgspec.json.decode(compile_one(b"{"), type=Answer)
    assert answer.error.startswith("unexpected DecodeError")


# --- TLS


@pytest.mark.slow
def test_tls_comes_from_dasks_own_configuration(
    tmp_path: Path, team: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dask

    monkeypatch.setattr(dask_farm, "_CONNECT", 5.0)
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=farm -keyout {key} "
        f"-out {cert}".split(),
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("needs openssl")
    tls = ("--protocol", "tls", "--tls-ca-file", cert, "--tls-cert", cert, "--tls-key", key)
    root = kernels(tmp_path / "repo", team, {"k": SAXPY})
    with farms.farm(tmp_path / "farm", *tls) as farm:
        assert farm.address.startswith("tls://")
        farm.worker("one", "cuda=1", *tls)
        waiting(farm, 1)
        address = farm.address.replace("tls://", "dask://")
        assert "does not answer over tcp" in left_out(settings_of(root, address))
        (root / "k.cu").write_text(SAXPY.replace("a * x", "9 + a * x"))
        names = {"ca-file": cert, "client.cert": cert, "client.key": key}
        with dask.config.set({f"distributed.comm.tls.{one}": v for one, v in names.items()}):
            result, warnings, _ = built(settings_of(root, address))
    assert warnings == []
    assert [one.where.partition(" ")[2] for one in result.outcomes] == ["(one)"]


# --- graphs


@pytest.mark.slow
def test_a_graph_compiled_on_the_farm_is_not_even_derived_here(
    standing: farms.Farm, tmp_path: Path, team: Path
) -> None:
    root = write_project(tmp_path / "toy")
    with (root / "pyproject.toml").open("a") as file:
        file.write(f'[tool.max-build.cache]\nshared = "{team}"\n')
    result, warnings, told = built(settings_of(root, standing.address))
    (outcome,) = result.outcomes
    assert warnings == []
    assert outcome.state == "compiled"
    assert outcome.where
    assert not any(event.what == "deriving" for event in told)
