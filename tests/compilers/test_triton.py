"""The `triton` adapter: what its key follows and what it does not, and what comes out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from max_build import load_settings
from max_build.compilers import Derivation, Job
from max_build.compilers.cubin import read_cubin
from max_build.compilers.triton import TritonCompiler
from max_build.compilers.triton_environment import relevant
from max_build.errors import CompileError, ConfigError
from max_build.key import changes, key_of
from max_build.messages import Derive, Derived
from max_build.pipeline import build
from max_build.recipes.recall import Recall
from max_build.recipes.recipe import Recipe
from max_build.record import Kernel
from max_build.store import open_cache
from max_build.target import Target
from max_build.workers import Worker

pytest.importorskip("triton", reason="Triton is not installed")
# Triton 3.9 announces another default of its next release, whatever a unit's options say.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")

KERNELS = """
import triton
import triton.language as tl

from toyk.maths import twice


@triton.jit
def add(x, y, out, n, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    total = tl.load(x + i, mask=inside) + twice(tl.load(y + i, mask=inside)) * SCALE
    tl.device_assert(total == total, "not a number")
    tl.store(out + i, total, mask=inside)


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def tuned(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def plain(x):
    return x
"""
MATHS = """
import triton


@triton.jit
def twice(x):
    return x + x
"""
UNIT = """
entry = "toyk.kernels:add"
signature = { x = "*fp32:16", y = "*fp32:16", out = "*fp32:16", n = "i32" }
constexprs = { SCALE = 0.1, BLOCK = 128 }
"""


def write(root: Path, unit: str = UNIT, kernels: str = KERNELS, maths: str = MATHS) -> Path:
    package = root / "src" / "toyk"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(kernels)
    (package / "maths.py").write_text(maths)
    (root / "pyproject.toml").write_text(
        '[project]\nname = "toyk"\nversion = "1"\n[tool.max-build]\ntargets = ["sm_90a"]\n'
        f"[tool.max-build.kernels.add]\n{unit}"
    )
    return root


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(root: Path | None = None, target: str = "sm_90a", **texts: str) -> Job:
        root = write(root or tmp_path / "repo", **texts)
        settings = load_settings(root)
        scratch = tmp_path / "scratch" / str(len(list(tmp_path.glob("scratch/*"))))
        scratch.mkdir(parents=True)
        return Job(settings.units[0], Target(target), root, settings.python_path, scratch)

    return make


def derived(job: Job) -> Derivation:
    found = TritonCompiler().derive(job)
    assert found.uncacheable == ""
    return found


def key(job: Job) -> str:
    return key_of(derived(job).components)


def built(job: Job) -> tuple[dict[str, bytes], Mapping[str, Kernel]]:
    """Kernel name → cubin, and the kernels."""
    product = TritonCompiler().compile(job, derived(job))
    files = product.files["cubin"]
    listed = (files,) if isinstance(files, Path) else files
    cubins = dict(zip(product.kernels, (one.read_bytes() for one in listed), strict=True))
    return cubins, product.kernels


@pytest.mark.parametrize("target", [str(one) for one in TritonCompiler.accepts])
def test_every_accepted_target_gives_code_for_exactly_it(job, target: str) -> None:
    cubins, kernels = built(job(target=target))
    found = read_cubin(cubins["add"])
    assert found.arch == target
    assert kernels["add"].lowered in found.entry_points


def test_the_record_keeps_what_a_launch_needs(job) -> None:
    _, kernels = built(job(unit=UNIT + "num-warps = 8\n"))
    (kernel,) = kernels.values()
    assert kernel.lowered == "add"
    assert kernel.num_warps == 8
    assert kernel.signature == ("*fp32:16", "*fp32:16", "*fp32:16", "i32")
    assert kernel.cluster == (1, 1, 1)
    assert set(kernel.scratch_bytes) <= {0}


def test_specialisations_are_kernels_of_one_unit_each_with_its_cubin(job) -> None:
    unit = UNIT + (
        "[tool.max-build.kernels.add.specialisations]\n"
        "small = { constexprs = { BLOCK = 64 } }\n"
        'half = { signature = { x = "*fp16", y = "*fp16", out = "*fp16" }, num-warps = 2 }\n'
    )
    cubins, kernels = built(job(unit=unit))
    assert set(kernels) == {"small", "half"}
    assert kernels["half"].signature == ("*fp16", "*fp16", "*fp16", "i32")
    assert (kernels["small"].num_warps, kernels["half"].num_warps) == (4, 2)
    assert kernels["small"].blob != kernels["half"].blob
    assert cubins["small"] != cubins["half"]


def test_an_autotuned_kernel_is_compiled_for_the_constants_given(job) -> None:
    unit = 'entry = "toyk.kernels:tuned"\nsignature = { x = "*fp32", n = "i32" }\n'
    _, kernels = built(job(unit=unit + "constexprs = { BLOCK = 64 }\n"))
    assert kernels["add"].lowered == "tuned"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("constant by one ulp", {"unit": UNIT.replace("0.1", "0.10000001")}),
        ("block", {"unit": UNIT.replace("128", "256")}),
        ("alignment", {"unit": UNIT.replace('x = "*fp32:16"', 'x = "*fp32"')}),
        ("type, as the record has it", {"unit": UNIT.replace('"i32"', '"u32"')}),
        ("warps", {"unit": UNIT + "num-warps = 8\n"}),
        ("stages", {"unit": UNIT + "num-stages = 4\n"}),
        ("option", {"unit": UNIT + "options = { enable-fp-fusion = false }\n"}),
        ("helper of another module", {"maths": MATHS.replace("x + x", "x + x + x")}),
    ],
)
def test_what_changes_the_code_changes_the_key(job, name: str, texts: dict[str, str]) -> None:
    assert key(job(**texts)) != key(job()), name


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("three lines down", {"kernels": "# a\n# b\n# c\n" + KERNELS}),
        ("comment", {"kernels": KERNELS.replace("inside = i < n", "inside = i < n  # bounds")}),
        ("renamed variable", {"kernels": KERNELS.replace("total", "outcome")}),
        ("default spelled out", {"unit": UNIT + "num-warps = 4\nnum-stages = 3\n"}),
        ("option at its default", {"unit": UNIT + "options = { debug = false }\n"}),
    ],
)
def test_what_does_not_change_the_code_does_not_change_the_key(
    job, name: str, texts: dict[str, str]
) -> None:
    assert changes(derived(job()).components, derived(job(**texts)).components) == (), name


def test_line_information_is_the_same_from_two_checkouts_and_follows_the_lines(
    job, tmp_path: Path
) -> None:
    unit = UNIT + "options = { lineinfo = true, debug = true }\n"
    first = job(tmp_path / "a" / "repo", unit=unit)
    cubins, _ = built(first)
    copy = tmp_path / "elsewhere" / "b"
    shutil.copytree(first.root, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    second = job(copy, unit=unit)
    assert key(first) == key(second)
    again, _ = built(second)
    assert again == cubins
    assert str(tmp_path).encode() not in cubins["add"]
    assert b"toyk" in cubins["add"]
    assert key(job(copy, unit=unit, kernels="# down\n" + KERNELS)) != key(first)


def test_without_line_information_the_place_leaves_no_trace(job, tmp_path: Path) -> None:
    cubins, _ = built(job(tmp_path / "a"))
    again, _ = built(job(tmp_path / "b" / "c"))
    assert again == cubins


def test_one_process_sees_each_version_of_a_module(job) -> None:
    """Same size, same second, and bytecode lying there: an import would take the old one."""
    first = job()
    for pyc in (first.root / "src").rglob("__pycache__"):
        shutil.rmtree(pyc)
    old = key(first)
    assert "toyk.maths" not in sys.modules
    stamp = os.stat(first.root / "src/toyk/maths.py")
    __import__("py_compile").compile(str(first.root / "src/toyk/maths.py"))
    second = job(maths=MATHS.replace("x + x", "x * x"))
    os.utime(first.root / "src/toyk/maths.py", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert key(second) != old


def test_one_process_keeps_two_projects_apart(job, tmp_path: Path) -> None:
    one = key(job(tmp_path / "one"))
    other = key(job(tmp_path / "two", maths=MATHS.replace("x + x", "x * x")))
    assert one != other
    assert key(job(tmp_path / "one")) == one


def test_nothing_of_the_job_stays_in_the_process(job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/nowhere")
    before, path = dict(os.environ), sys.path[:]
    text = KERNELS + "\ntriton.knobs.language.fp32_default = 'ieee'\n"
    built(job(kernels=text))
    assert dict(os.environ) == before
    assert sys.path == path
    import triton

    assert triton.knobs.language.fp32_default is None


def test_the_source_tree_is_not_written_to(job) -> None:
    one = job()
    built(one)
    assert not list(one.root.rglob("__pycache__"))


def test_a_setting_made_by_the_module_is_in_the_key(job) -> None:
    text = KERNELS + "\ntriton.knobs.language.default_fp_fusion = False\n"
    assert key(job(kernels=text)) != key(job())


@pytest.mark.parametrize(
    ("variables", "same"),
    [
        ({"DISABLE_PTXAS_OPT": "0"}, True),
        ({"DISABLE_PTXAS_OPT": "off"}, True),
        ({"DISABLE_PTXAS_OPT": ""}, True),
        ({"DISABLE_PTXAS_OPT": "1"}, False),
        ({"TRITON_DEFAULT_FP_FUSION": "1"}, True),
        ({"TRITON_DEFAULT_FP_FUSION": "0"}, False),
        ({"TRITON_F32_DEFAULT": "ieee"}, False),
        ({"TRITON_UNHEARD_OF": "7"}, False),
        ({"TRITON_CACHE_DIR": "/somewhere", "TRITON_HOME": "/else"}, True),
        ({"TRITON_INTERPRET": "1"}, True),
        ({"TRITON_KERNEL_DUMP": "1"}, True),
        ({"TRITON_OVERRIDE_ARCH": "sm80"}, True),
    ],
)
def test_unset_and_default_are_equal_and_all_else_counts(
    job, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], same: bool
) -> None:
    plain = key(job())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (key(job()) == plain) is same


def test_a_tool_named_by_its_path_counts_by_its_bytes(tmp_path: Path) -> None:
    tools = [tmp_path / "a" / "ptxas", tmp_path / "b" / "ptxas"]
    for tool in tools:
        tool.parent.mkdir()
        tool.write_bytes(b"one")
    found = [relevant({"TRITON_PTXAS_PATH": str(tool)})[0] for tool in tools]
    assert found[0] == found[1] != {}
    tools[1].write_bytes(b"two")
    assert relevant({"TRITON_PTXAS_PATH": str(tools[1])})[0] != found[0]


def test_what_answers_in_place_of_the_compiler_is_not_kept(
    job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_KERNEL_OVERRIDE", "1")
    assert "TRITON_KERNEL_OVERRIDE" in TritonCompiler().derive(job()).uncacheable


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ({"kernels": KERNELS + "\n1 / 0\n"}, "ZeroDivisionError"),
        ({"unit": UNIT.replace("kernels:add", "kernels:none")}, "has no `none`"),
        ({"unit": UNIT.replace("kernels:add", "nothing:add")}, "cannot be imported"),
        ({"unit": UNIT.replace("kernels:add", "kernels:plain")}, "must be a kernel"),
        ({"unit": UNIT.replace(', n = "i32"', "")}, "`n` has neither a type"),
        ({"unit": UNIT.replace("SCALE", "SCALING")}, "no argument `SCALING`"),
        ({"kernels": KERNELS.replace("tl.arange(0, BLOCK)", "tl.arange(0, n)")}, "refused `add`"),
        ({"unit": UNIT.replace("128", "100")}, "power of 2"),
    ],
)
def test_a_users_mistake_is_told(job, texts: dict[str, str], told: str) -> None:
    with pytest.raises(CompileError, match=told.replace("(", r"\(")):
        TritonCompiler().derive(job(**texts))


@pytest.mark.parametrize(
    ("texts", "place"),
    [
        ({"kernels": KERNELS + "\n1 / 0\n"}, "(`src/toyk/kernels.py`, line 27)"),
        ({"maths": "import triton\n\n1 / 0\n"}, "(`src/toyk/maths.py`, line 3)"),
        ({"maths": "import triton\nif\n"}, "(`src/toyk/maths.py`, line 2)"),
        (
            {"kernels": KERNELS.replace("tl.arange(0, BLOCK)", "tl.arange(0, n)")},
            "at `src/toyk/kernels.py`, line 10:",
        ),
        ({"maths": MATHS.replace("x + x", "x + none")}, "at `src/toyk/maths.py`, line 7:"),
    ],
)
def test_a_mistake_is_told_where_it_stands_in_the_project(
    job, texts: dict[str, str], place: str
) -> None:
    with pytest.raises(CompileError, match=re.escape(place)):
        TritonCompiler().derive(job(**texts))


@pytest.mark.parametrize("items", ["--options-file=F", "-v -optf=F", "-O1 F", "-o=F", "--knob=x"])
def test_options_of_ptxas_that_could_name_a_file_are_refused(
    job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, items: str
) -> None:
    with pytest.raises(ConfigError, match=r"options\.ptx-options. must not have"):
        load_settings(write(tmp_path / "b", UNIT + f'options = {{ ptx-options = "{items}" }}\n'))
    monkeypatch.setenv("PTXAS_OPTIONS", items)
    assert "ptxas is given" in TritonCompiler().derive(job()).uncacheable


def test_plain_options_of_ptxas_are_let_through(job) -> None:
    unit = UNIT + 'options = { ptx-options = "-O1 --fmad=false" }\n'
    assert TritonCompiler().derive(job(unit=unit)).uncacheable == ""


def test_every_wrong_setting_is_told_at_once(tmp_path: Path) -> None:
    unit = UNIT.replace('n = "i32"', 'n = "int33"') + (
        "num-warps = 3\nkeep-ptx = true\noptions = { speed = 11, debug = 1 }\n"
        "[tool.max-build.kernels.add.specialisations.a]\nnum-stagse = 2\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path, unit))
    text = str(caught.value)
    for wrong in ("int33", "num-warps", "keep-ptx", "speed", "options.debug", "num-stagse"):
        assert wrong in text


def test_a_plain_target_from_90_on_is_refused_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sm_90a"):
        load_settings(write(tmp_path, UNIT + 'targets = ["sm_90"]\n'))


def test_a_build_in_workers_compiles_once_and_hits_afterwards(tmp_path: Path) -> None:
    unit = UNIT + (
        "[tool.max-build.kernels.add.specialisations]\n"
        "small = { constexprs = { BLOCK = 64 } }\nlarge = { constexprs = { BLOCK = 1024 } }\n"
    )
    settings = load_settings(write(tmp_path / "repo", unit))
    with open_cache(settings.cache) as cache:
        states: list[Any] = [
            [one.state for one in build(settings, cache).outcomes] for _ in range(2)
        ]
        (outcome,) = build(settings, cache, mode="require-hit").outcomes
        record = outcome.record
        assert record is not None
        cubins = [blob for blob in record.blobs if blob.role == "cubin"]
        assert {kernel.blob for kernel in record.kernels.values()} == {b.digest for b in cubins}
        assert all(read_cubin(cache.path(blob).read_bytes()).arch == "sm_90a" for blob in cubins)
    assert states == [["compiled"], ["cached"]]


# --- recipes


def recorded(job: Job) -> tuple[Recipe | None, str]:
    """The recipe of a derivation in a worker of its own, or why there is none."""
    worker = Worker(job.root)
    try:
        answer = worker.ask(
            Derive(job.unit, str(job.target), str(job.root), job.python_path, str(job.scratch)),
            Derived,
            timeout=120.0,
        )
    finally:
        worker.close()
    return answer.recipe, answer.always


def test_a_recipe_is_of_the_projects_files_and_the_triton_distribution(job) -> None:
    recipe, always = recorded(job())
    assert always == ""
    assert recipe is not None
    assert set(recipe.files) == {"src/toyk/__init__.py", "src/toyk/kernels.py", "src/toyk/maths.py"}
    assert set(recipe.distributions) == {"triton"}
    assert "ptxas" not in recipe.components.compiler


def test_a_ptxas_from_elsewhere_is_in_the_key_and_leaves_no_recipe(
    job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton

    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    other = tmp_path / "ptxas"
    other.write_text(f'#!/bin/sh\nexec "{own}" "$@"\n')
    other.chmod(0o755)
    plain = key(job())
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    recipe, always = recorded(job())
    assert recipe is None
    assert always == "what `ptxas` is can only be told by a derivation"
    assert key(job()) != plain


def test_what_a_recipe_is_looked_up_by_counts_files_by_their_bytes(tmp_path: Path) -> None:
    ambient = TritonCompiler().ambient
    library = tmp_path / "libdevice.bc"
    library.write_bytes(b"one")
    before = ambient({"TRITON_LIBDEVICE_PATH": str(library), "TRITON_HOME": "/a", "HOME": "/b"})
    assert set(before) == {"TRITON_LIBDEVICE_PATH"}
    library.write_bytes(b"two")
    assert ambient({"TRITON_LIBDEVICE_PATH": str(library)}) != before
    assert ambient({"TRITON_DEFAULT_FP_FUSION": "0"}) == {"TRITON_DEFAULT_FP_FUSION": "0"}


def test_an_all_hit_build_starts_no_worker_and_imports_no_triton(tmp_path: Path) -> None:
    unit = 'entry = "toyk.kernels:tuned"\nsignature = { x = "*fp32", n = "i32" }\n'
    unit += 'constexprs = { BLOCK = 64 }\ntargets = ["sm_80", "sm_90a"]\n'
    root = write(tmp_path / "repo", unit)
    settings = load_settings(root)
    with open_cache(settings.cache) as cache:
        first = [one.record for one in build(settings, cache).outcomes]
        code = (
            "import pathlib, sys\n"
            "from max_build import load_settings\n"
            "from max_build.pipeline import build\n"
            "from max_build.store import open_cache\n"
            "started = []\n"
            "sys.addaudithook(lambda *one: one[0] == 'subprocess.Popen' and started.append(one))\n"
            "settings = load_settings(pathlib.Path(sys.argv[1]))\n"
            "with open_cache(settings.cache) as cache:\n"
            "    found = build(settings, cache).outcomes\n"
            "print(*(one.state for one in found), 'triton' in sys.modules, len(started))\n"
            "print(*(one.record.key for one in found))\n"
        )
        again = subprocess.run(
            [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True
        )
        keys = " ".join(record.key for record in first if record is not None)
        assert again.stdout.splitlines() == ["cached cached False 0", keys]

        recall = Recall(settings, cache)
        target = Target("sm_90a")
        assert recall.key(settings.units[0], target) in keys
        (root / "src/toyk/maths.py").write_text(MATHS.replace("x + x", "x * x"))
        recall = Recall(settings, cache)
        assert recall.key(settings.units[0], target) == ""
        assert recall.stale(settings.units[0], target) == "`src/toyk/maths.py` changed"


def test_what_one_unit_does_leaves_the_recipe_of_the_next_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_BUILD_JOBS", "1")
    unit = 'signature = { x = "*fp32", n = "i32" }\nconstexprs = { BLOCK = 64 }\n'
    root = write(tmp_path / "repo", f'entry = "toyk.kernels:tuned"\n{unit}')
    with (root / "pyproject.toml").open("a") as file:
        file.write(f'[tool.max-build.kernels.a]\nentry = "toyk.clock:tuned"\n{unit}')
    (root / "src/toyk/clock.py").write_text(
        "import time\nfrom toyk.kernels import tuned\nNOW = time.time()\n"
    )
    settings = load_settings(root)
    with open_cache(settings.cache) as cache:
        always = {one.unit.name: one.always for one in build(settings, cache).outcomes}
        recall = Recall(settings, cache)
        known = {one.name: recall.key(one, Target("sm_90a")) for one in settings.units}
    assert always == {"a": "`src/toyk/clock.py` reads the clock", "add": ""}
    assert known["add"]
    assert not known["a"]


def test_a_triton_in_front_of_the_one_that_is_installed_is_not_kept(
    job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    own, checkout = Path(triton.__file__).parent, tmp_path / "checkout" / "triton"
    checkout.mkdir(parents=True)
    for one in own.iterdir():
        if one.name != "__pycache__":
            (checkout / one.name).symlink_to(one)
    (checkout / "errors.py").unlink()
    shutil.copy(own / "errors.py", checkout)
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{checkout.parent}:{path}")
    made = job()
    worker = Worker(str(made.root))
    try:
        answer = worker.ask(
            Derive(
                made.unit, str(made.target), str(made.root), made.python_path, str(made.scratch)
            ),
            Derived,
            timeout=120,
        )
    finally:
        worker.close()
    assert answer.uncacheable == (
        f"`triton.errors` was imported from `{checkout}/errors.py`, and is installed at "
        f"`{own}/errors.py`"
    )
