"""What decides a graph's key, seen on a real MAX graph in a real worker; nothing is compiled."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from max_build.compilers.max_graph import canonical_options
from max_build.compilers.mojo_libraries import tree_digest
from max_build.config import load_settings
from max_build.errors import CompileError, MaxBuildError
from max_build.key import changes, digest, key_of
from max_build.messages import Derive, Derived
from max_build.pipeline import build
from max_build.recipes.recipe import broken
from max_build.recipes.surroundings import Here
from max_build.store import open_cache
from max_build.workers import Worker, environment
from support import GRAPH, PYPROJECT, run, write_project

Derivation = Callable[..., Derived]

WITH_OPS = GRAPH.replace("from max.dtype", "from pathlib import Path\nfrom max.dtype").replace(
    "device)]) as graph",
    "device)],\n        custom_extensions=[Path(__file__).parent / 'ops']) as graph",
)
WITH_ADDED = """
from pathlib import Path
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops

def build(target):
    kind = TensorType(DType.float32, [1], DeviceRef.CPU())
    library = Path(__file__).parent / 'ops'
    with Graph("added", input_types=[kind], custom_extensions=[library]) as graph:
        graph.output(ops.custom("add_n", DeviceRef.CPU(), [graph.inputs[0].tensor], [kind])[0])
    return graph
"""
ADDED = """
from extensibility import register, InputTensor, OutputTensor
from std.utils.index import IndexList
from sib import N

@register("add_n")
struct AddN:
    @staticmethod
    def execute[target: StaticString](
        output: OutputTensor, x: InputTensor[dtype=output.dtype, rank=output.rank, ...]
    ) raises:
        var first = IndexList[output.rank](0)
        output.store(first, x.load[1](first) + Scalar[output.dtype](N))
"""


@pytest.fixture
def derive(tmp_path: Path) -> Derivation:
    """Writes the toy repo with changes, and derives it for a target in a worker."""
    counter = iter(range(100))

    def derive(
        *, root: Path | None = None, target: str = "cpu", check: bool = True, **changed: str
    ) -> Derived:
        root = write_project(root or tmp_path / f"repo{next(counter)}", **changed)
        settings = load_settings(root)
        scratch = tmp_path / f"scratch{next(counter)}"
        scratch.mkdir()
        worker = Worker(root)
        try:
            return worker.ask(
                Derive(
                    settings.units[0], target, settings.root, settings.python_path, str(scratch)
                ),
                Derived,
                timeout=120,
            )
        finally:
            worker.close()

    return derive


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Derived:
    """The toy repo, unchanged."""
    make = derive.__wrapped__(tmp_path_factory.mktemp("before"))  # type: ignore[attr-defined]
    return make()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("SCALE = [", "# a comment\n\n\nSCALE = ["), id="comment"),
        pytest.param(("scale", "factor"), id="variable-renamed"),
        pytest.param(
            ("def build(target):", "def build(target):\n    print('noise')"), id="prints-to-stdout"
        ),
        pytest.param(("1.0, 2.0", "1.00, 2"), id="same-constant-spelt-otherwise"),
    ],
)
def test_what_does_not_change_the_graph_is_a_hit(
    derive: Derivation, before: Derived, change: tuple[str, str]
) -> None:
    assert change[0] in GRAPH
    after = derive(graph=GRAPH.replace(*change))
    assert key_of(after.components) == key_of(before.components)


def test_a_moved_file_is_a_hit(derive: Derivation, before: Derived, tmp_path: Path) -> None:
    root = write_project(tmp_path / "moved")
    inner = root / "src" / "toy" / "models"
    inner.mkdir()
    (inner / "__init__.py").write_text("")
    shutil.copy(root / "src" / "toy" / "graph.py", inner / "affine.py")
    after = derive(
        root=root, pyproject=PYPROJECT.replace("toy.graph:build", "toy.models.affine:build")
    )
    assert key_of(after.components) == key_of(before.components)


def test_another_path_home_user_and_locale_is_a_hit(
    derive: Derivation, before: Derived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("USER", "another")
    monkeypatch.setenv("LOGNAME", "another")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    monkeypatch.setenv("MODULAR_USER_ID", "another")
    after = derive(root=tmp_path / "a" / "deep" / "path")
    assert key_of(after.components) == key_of(before.components)


@pytest.mark.parametrize(
    ("change", "component"),
    [
        pytest.param(("2.0,", "2.0000002384185791015625,"), "sources.ir", id="one-ulp"),
        pytest.param(("x * scale", "x - scale"), "sources.ir", id="one-op"),
        pytest.param(('["n", 4]', '["n", "m", 4]'), "sources.ir", id="one-dimension"),
        pytest.param(('["n", 4]', "[8, 4]"), "sources.ir", id="a-fixed-dimension"),
        pytest.param(('Weight("bias"', 'Weight("offset"'), "sources.ir", id="a-weights-name"),
    ],
)
def test_what_changes_the_graph_is_a_miss(
    derive: Derivation, before: Derived, change: tuple[str, str], component: str
) -> None:
    assert change[0] in GRAPH
    after = derive(graph=GRAPH.replace(*change))
    (named,) = changes(before.components, after.components)
    assert named[0] == component


def test_the_host_baseline_is_a_miss(derive: Derivation, before: Derived) -> None:
    after = derive(pyproject=PYPROJECT.replace("targets = [", 'host = "x86-64-v2"\ntargets = ['))
    assert changes(before.components, after.components) == (("host", "x86-64-v3", "x86-64-v2"),)


def test_the_target_is_a_miss(derive: Derivation, before: Derived) -> None:
    names = [one[0] for one in changes(before.components, derive(target="sm_90a").components)]
    assert names == ["sources.ir", "target"]


@pytest.mark.parametrize(
    ("options", "component"),
    [
        ("tile-based-fusion = true", "options.tile-based-fusion"),
        ("defines = { A = 1 }", "options.define.A"),
    ],
)
def test_options_are_a_miss(
    derive: Derivation, before: Derived, options: str, component: str
) -> None:
    after = derive(pyproject=f"{PYPROJECT}\noptions = {{ {options} }}\n")
    assert [one[0] for one in changes(before.components, after.components)] == [component]


def test_a_define_is_keyed_with_its_type(derive: Derivation) -> None:
    one, other = (
        derive(pyproject=f"{PYPROJECT}\noptions = {{ defines = {{ A = {value} }} }}\n")
        for value in ("1", '"1"')
    )
    assert key_of(one.components) != key_of(other.components)


def test_variables_that_max_reads_are_a_miss_and_those_for_its_caches_are_not(
    derive: Derivation, before: Derived, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODULAR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MODULAR_ENABLE_CACHE_LOGGING", "0")
    assert key_of(derive().components) == key_of(before.components)
    monkeypatch.setenv("MODULAR_NVPTX_COMPILER_WARN", "1")
    (named,) = changes(before.components, derive().components)
    assert named[0] == "environment.MODULAR_NVPTX_COMPILER_WARN"


def test_what_is_compiled_with_parts_that_no_distribution_brought_is_not_kept(
    derive: Derivation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "MODULAR_MOJO_MAX_IMPORT_PATH"
    spec = importlib.util.find_spec("modular")
    assert spec is not None and spec.submodule_search_locations is not None
    own = os.path.join(next(iter(spec.submodule_search_locations)), "lib", "mojo")
    monkeypatch.setenv(name, own)
    assert derive().uncacheable == ""
    for foreign in (f"{own},{tmp_path}", str(tmp_path), f"{own}{os.sep}..{os.sep}..{os.sep}.."):
        monkeypatch.setenv(name, foreign)
        assert derive().uncacheable == f"`{name}` is set, and what it brings in cannot be keyed"


def test_the_compilers_every_distribution_is_in_the_key(before: Derived) -> None:
    assert {"max", "max-core", "mojo-compiler"} <= before.components.compiler.keys()
    assert all("+" in identity for identity in before.components.compiler.values())


def refused(derive: Derivation, **changed: str) -> str:
    with pytest.raises(MaxBuildError) as caught:
        derive(**changed)
    assert isinstance(caught.value, CompileError)
    return str(caught.value)


def test_an_error_inside_of_max_is_told_where_the_project_called_it(derive: Derivation) -> None:
    graph = (
        "from max.dtype import DType\nfrom max.graph import DeviceRef, Graph, TensorType\n"
        "def layer(x):\n    return x @ x\n"
        "def build(target):\n"
        "    kind = TensorType(DType.float32, (2, 3), DeviceRef.CPU())\n"
        "    with Graph('g', input_types=[kind]) as graph:\n"
        "        graph.output(layer(graph.inputs[0].tensor))\n"
        "    return graph\n"
    )
    told = refused(derive, graph=graph)
    assert "(`src/toy/graph.py`, line 4)\n  called from `src/toy/graph.py`, line 8" in told
    assert "site-packages" not in told


def test_a_builder_that_raises(derive: Derivation) -> None:
    told = refused(derive, graph="def build(target):\n    raise ValueError('no such layer')\n")
    assert "`toy.graph:build` raised ValueError: no such layer (`src/toy/graph.py`, line 2)" in told
    assert "Traceback" not in told


def test_a_builder_that_returns_something_else(derive: Derivation) -> None:
    told = refused(derive, graph="def build(target):\n    return {'a': 1}\n")
    assert "must return a `max.graph.Graph`, it returned `builtins.dict`" in told


def test_a_graph_without_an_output(derive: Derivation) -> None:
    graph = (
        "from max.graph import Graph\ndef build(target):\n    return Graph('g', input_types=[])\n"
    )
    assert "without an output" in refused(derive, graph=graph)


def test_an_entry_that_does_not_import(derive: Derivation) -> None:
    told = refused(derive, graph="import nonesuch\n")
    assert "module `toy.graph` cannot be imported: ModuleNotFoundError" in told
    assert "looked in `src`, `.` of the project" in told


def test_an_entry_with_a_syntax_error(derive: Derivation) -> None:
    assert "SyntaxError" in refused(derive, graph="def build(target:\n")


def test_an_entry_whose_module_has_no_such_function(derive: Derivation) -> None:
    told = refused(derive, pyproject=PYPROJECT.replace("toy.graph:build", "toy.graph:make"))
    assert "`toy.graph` has no `make`" in told


def test_a_builder_that_ends_the_process(derive: Derivation) -> None:
    told = refused(derive, graph="import sys\ndef build(target):\n    sys.exit(3)\n")
    assert "ended the process with status 3" in told


def test_a_builder_that_dies_is_told_with_its_last_words(derive: Derivation) -> None:
    told = refused(
        derive,
        graph="import os\ndef build(_):\n    print('about to die', flush=True)\n    os._exit(7)\n",
    )
    assert "left with status 7 before it answered" in told
    assert "about to die" in told


def test_a_builder_that_is_killed(derive: Derivation) -> None:
    told = refused(
        derive, graph="import os, signal\ndef build(t):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert "was killed (SIGKILL), most likely because memory ran out" in told
    assert "hint: `MAX_BUILD_JOBS=1`" in told


def test_a_set_or_a_locale_shapes_the_graph_the_same_everywhere(derive: Derivation) -> None:
    graph = GRAPH.replace(
        "SCALE = [1.0, 2.0, 3.0, 4.0]",
        "SCALE = [float(ord(c)) for c in {'a', 'b', 'c', 'd'}]",
    )
    assert len({key_of(derive(graph=graph).components) for _ in range(3)}) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="mojo packages are compiled on Linux here")
def test_a_kernel_library_is_keyed_by_every_source_of_its_package(
    derive: Derivation, tmp_path: Path
) -> None:
    graph = WITH_OPS

    def library(root: Path, helper: str) -> Path:
        ops = write_project(root, graph=graph) / "src" / "toy" / "ops"
        ops.mkdir()
        (ops / "__init__.mojo").write_text("from .helper import answer\n")
        (ops / "helper.mojo").write_text(f"def answer() -> Int:\n    return {helper}\n")
        return root

    one = derive(root=library(tmp_path / "one", "42"), graph=graph)
    same = derive(root=library(tmp_path / "same", "42"), graph=graph)
    other = derive(root=library(tmp_path / "other", "43"), graph=graph)
    assert one.uncacheable == ""
    assert key_of(one.components) == key_of(same.components)
    names = [name for name, _, _ in changes(one.components, other.components)]
    assert names == ["dependencies.library.1", "sources.ir"]


@pytest.mark.skipif(sys.platform != "linux", reason="mojo packages are compiled on Linux here")
def test_a_module_beside_a_kernel_library_is_in_its_key_and_its_recipe(
    derive: Derivation, tmp_path: Path
) -> None:
    root = write_project(tmp_path / "repo", graph=WITH_OPS)
    package = root / "src" / "toy"
    (package / "ops").mkdir()
    (package / "ops" / "__init__.mojo").write_text("from sib import N\n")
    (package / "sib").mkdir()  # found although it has no `__init__.mojo`
    (package / "sib.mojo").write_text("comptime N = 1\n")
    before = derive(root=root, graph=WITH_OPS)
    assert (before.uncacheable, before.always) == ("", "")
    assert broken_now(before, root) == ""
    (package / "sib.mojo").write_text("comptime N = 2\n")
    assert broken_now(before, root) == "`src/toy/sib.mojo` changed"
    after = derive(root=root, graph=WITH_OPS)
    assert "dependencies.library.1" in [
        name for name, _, _ in changes(before.components, after.components)
    ]
    (package / "other.mojo").write_text("")
    assert broken_now(after, root) == "files were added to or removed from `src/toy`"
    (package / "other.mojo").unlink()
    (package / "sib" / "new.mojo").write_text("")
    assert broken_now(after, root) == "files were added to or removed from `src/toy/sib`"


def broken_now(derived: Derived, root: Path) -> str:
    assert derived.recipe is not None
    settings = load_settings(root)
    here = Here(
        settings.root,
        settings.python_path,
        environment(os.environ),
        lambda path: digest(Path(path).read_bytes()),
        {},
    )
    return broken(derived.recipe, here)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mojo packages are compiled on Linux here")
def test_a_compiled_library_that_is_linked_to_another_is_compiled_with_it(tmp_path: Path) -> None:
    """MAX's own cache answers here with the model of the other state."""
    from mojo.run import subprocess_run_mojo

    graph = WITH_ADDED.replace("'ops'", "'ops.mojoc'")
    root = write_project(tmp_path / "repo", graph=graph)
    package, sources = root / "src" / "toy", tmp_path / "mojo"
    for name in ("ops", "sib"):
        (sources / name).mkdir(parents=True)
    (sources / "ops" / "__init__.mojo").write_text(
        ADDED.replace("sib import N", "sib import n").replace("(N)", "(n())")
    )
    settings = load_settings(root)
    answers = []
    for n in (10, 20):
        (sources / "sib" / "__init__.mojo").write_text(f"def n() -> Int:\n    return {n}\n")
        for name in ("sib", "ops")[: 2 if n == 10 else 1]:
            arguments = ["precompile", str(sources / name), "-o", str(package / f"{name}.mojoc")]
            subprocess_run_mojo(arguments, check=True)
        shutil.move(sources, tmp_path / "away")
        with open_cache(settings.cache) as cache:
            (outcome,) = build(settings, cache).outcomes
            assert outcome.state == "compiled", outcome
            assert outcome.record is not None
            blob = outcome.record.blob("mef")
            assert blob is not None
            answers.append(added_by(cache.path(blob)))
        shutil.move(tmp_path / "away", sources)
    assert answers == [10, 20]


def added_by(mef: Path) -> float:
    code = (
        "import os, sys, numpy as np\n"
        "from max.driver import CPU\n"
        "from max.engine import InferenceSession\n"
        "model = InferenceSession(devices=[CPU()]).load(sys.argv[1])\n"
        "print(model.execute(np.zeros(1, np.float32))[0].to_numpy()[0], flush=True)\n"
        "os._exit(0)\n"
    )
    done = run([sys.executable, "-c", code, str(mef)], cwd=mef.parent)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_a_max_in_front_of_the_one_that_is_installed_is_not_kept(
    derive: Derivation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import max.dtype

    own = Path(max.dtype.__file__).parent
    shutil.copytree(own, tmp_path / "checkout" / "max" / "dtype")
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/checkout:{path}")
    told = derive().uncacheable
    assert f"was imported from `{tmp_path}/checkout/max/dtype/" in told
    assert f"and is installed at `{own}" in told


def test_the_cpu_that_the_projects_code_sets_is_not_compiled_for(tmp_path: Path) -> None:
    change = (
        "def build(target):\n    from max import driver; driver.set_virtual_cpu_target('x86-64')"
    )
    root = write_project(tmp_path / "repo", graph=GRAPH.replace("def build(target):", change))
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from max_build.compilers import Job\n"
        "from max_build.compilers.max_graph import MaxCompiler\n"
        "from max_build.config import load_settings\n"
        "from max_build.target import Target\n"
        "found = load_settings(Path('.'))\n"
        "job = Job(found.units[0], Target('cpu'), Path('.'), found.python_path, Path('.'))\n"
        "MaxCompiler().derive(job)\n"
        "from max import driver\n"
        "print(driver.get_virtual_cpu_target(), found.units[0].host, flush=True)\n"
        "os._exit(0)\n"
    )
    done = run([sys.executable, "-c", code], cwd=root)
    compiled_for, host = done.stdout.split()
    assert compiled_for == host != "x86-64"


def test_settings_of_max_that_the_projects_code_leads_to_are_in_the_recipe(
    derive: Derivation, tmp_path: Path
) -> None:
    change = (
        "def build(target):\n    import os; os.environ['MODULAR_HOME'] = os.path.dirname(__file__)"
    )
    graph = GRAPH.replace("def build(target):", change)
    root = write_project(tmp_path / "repo", graph=graph)
    configuration = root / "src" / "toy" / "modular.cfg"
    configuration.write_text("# one\n")
    before = derive(root=root, graph=graph)
    configuration.write_text("# two\n")
    assert broken_now(before, root) == "`src/toy/modular.cfg` changed"


@pytest.mark.parametrize(
    ("code", "component"),
    [
        (
            "import os; os.environ['USE_FI_TOPK_KERNEL'] = '1'",
            "environment.USE_FI_TOPK_KERNEL (set by the project)",
        ),
        (
            "from max.engine import InferenceSession as S; S.debug.assert_level = 'ALL'",
            "options.debug.assert_level",
        ),
    ],
)
def test_what_the_projects_code_sets_for_the_compile_is_a_miss(
    derive: Derivation, before: Derived, code: str, component: str
) -> None:
    after = derive(graph=GRAPH.replace("def build(target):", f"def build(target):\n    {code}"))
    assert [one[0] for one in changes(before.components, after.components)] == [component]


def test_the_options_of_a_session_are_those_that_decide_the_code() -> None:
    from max.engine import InferenceSession

    options = canonical_options(
        InferenceSession.debug, {"one": 1, "text": "1", "yes": True}, tile_based_fusion=True
    )
    assert options == {
        "define.one": "int 1",
        "define.text": "str 1",
        "define.yes": "bool True",
        "tile-based-fusion": "true",
    }


def test_a_kernel_librarys_digest_follows_links_and_survives_a_loop(tmp_path: Path) -> None:
    common, ops = tmp_path / "common", tmp_path / "ops"
    for folder in (common, ops):
        folder.mkdir()
        (folder / "__init__.mojo").write_text("")
    (ops / "common").symlink_to(common)
    (common / "again").symlink_to(ops)
    found = tree_digest(ops)
    (common / "__init__.mojo").write_text("alias n = 1\n")
    assert tree_digest(ops) != found


def test_a_graph_for_the_cpu_is_built_as_if_there_were_no_gpu(derive: Derivation) -> None:
    graph = GRAPH.replace(
        "def build(target):",
        "def build(target):\n    import os\n    assert os.environ['CUDA_VISIBLE_DEVICES'] == ''",
    )
    assert derive(graph=graph).components.target == "cpu"
