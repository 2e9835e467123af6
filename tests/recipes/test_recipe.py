"""Recipes: true only while a derivation would give the same, and a hit without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import toy_repo as toy
from max_build.config import load_settings
from max_build.key import Components, key_of
from max_build.outcomes import Build
from max_build.pipeline import build
from max_build.recipes.recall import Recall
from max_build.recipes.recipe import Distribution, Recipe, broken, decode, encode, lookup_key
from max_build.recipes.surroundings import Here, python
from max_build.store import CacheSettings, open_cache
from max_build.target import Target

COMPONENTS = Components(compiler={"max": "1.0+aa"}, target="cpu", sources={"ir": "0" * 64})


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    os.environ.pop("WIDTH", None)
    toy.forget()
    yield
    os.environ.pop("WIDTH", None)
    toy.forget()


def here(root: Path, toolchain: dict[str, str] | None = None, **environ: str) -> Here:
    def digest_of(path: str) -> str:
        return Path(path).read_text()

    return Here(str(root), (str(root / "src"), str(root)), environ, digest_of, toolchain or {})


def recipe(**fields: object) -> Recipe:
    return msgspec.convert(
        {"key": key_of(COMPONENTS), "components": COMPONENTS, "python": python(), **fields},
        Recipe,
        from_attributes=True,
    )


# --- what breaks one


def test_a_changed_or_removed_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    one = recipe(files={"a.py": "one"})
    assert broken(one, here(tmp_path)) == ""
    (tmp_path / "a.py").write_text("two")
    assert broken(one, here(tmp_path)) == "`a.py` changed"
    (tmp_path / "a.py").unlink()
    assert broken(one, here(tmp_path)) == "`a.py` was removed"


@pytest.mark.parametrize("name", ["tile.py", "tile.so", "tile.cpython-399.so", "tile"])
def test_a_module_that_would_be_found_first(tmp_path: Path, name: str) -> None:
    (tmp_path / "src").mkdir()
    one = recipe(modules={"src": {"tile": ()}, ".": {"tile": ("tile.py",)}})
    (tmp_path / "tile.py").touch()
    assert broken(one, here(tmp_path)) == ""
    if "." in name or name == "tile":
        (tmp_path / "src" / name).mkdir() if name == "tile" else (tmp_path / "src" / name).touch()
    why = broken(one, here(tmp_path))
    assert why == ("" if "399" in name else f"`src/{name}` was added")


def test_a_path_that_was_looked_at(tmp_path: Path) -> None:
    one = recipe(looked={"switch": "absent"})
    assert broken(one, here(tmp_path)) == ""
    (tmp_path / "switch").symlink_to("nowhere")
    assert broken(one, here(tmp_path)) == "`switch` was added"
    (tmp_path / "switch").unlink()
    (tmp_path / "switch").mkdir()
    assert broken(recipe(looked={"switch": "file"}), here(tmp_path)) == (
        "`switch` became a directory"
    )


def test_a_listing(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    one = recipe(listings={"parts": here(tmp_path).listing("parts")})
    assert broken(one, here(tmp_path)) == ""
    (tmp_path / "parts" / "__pycache__").mkdir()
    assert broken(one, here(tmp_path)) == ""
    (tmp_path / "parts" / "a").touch()
    assert "`parts`" in broken(one, here(tmp_path))


def test_a_variable(tmp_path: Path) -> None:
    one = recipe(variables={"N": here(tmp_path, N="4").variable("N"), "M": ""})
    assert broken(one, here(tmp_path, N="4")) == ""
    assert broken(one, here(tmp_path, N="5")) == "environment `N` changed"
    assert broken(one, here(tmp_path)) == "environment `N` unset"
    assert broken(one, here(tmp_path, N="4", M="")) == "environment `M` set"


def test_another_python(tmp_path: Path) -> None:
    one = recipe(python="cpython 3.2.1 linux m68k")
    assert broken(one, here(tmp_path)) == f"Python: cpython 3.2.1 linux m68k → {python()}"


def test_a_distribution_that_is_present_has_to_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.install(tmp_path / "site", monkeypatch)
    identity = here(tmp_path).identity("toy-compiler")
    one = recipe(distributions={"toy-compiler": {"identity": identity}})
    pinned = here(tmp_path, {"toy-compiler": "1.0"})
    assert broken(one, here(tmp_path)) == broken(one, pinned) == ""
    toy.write_compiler(tmp_path / "site", "1.1")
    toy.forget()
    assert broken(one, here(tmp_path)) == "`toy-compiler` 1.0 → 1.1"
    assert broken(one, here(tmp_path, {"toy-compiler": "1.0"})) == "`toy-compiler` 1.0 → 1.1"
    toy.write_compiler(tmp_path / "site", "1.0", extra="# rebuilt\n")
    toy.forget()
    assert broken(one, here(tmp_path)) == "`toy-compiler` 1.0 → 1.0 (another build)"


def test_a_distribution_that_is_absent_is_taken_as_given_where_it_is_pinned(
    tmp_path: Path,
) -> None:
    one = recipe(
        distributions={
            "big-part": Distribution(identity="2.0+bb"),
            "big-thing": Distribution(identity="1.0+local+aa", brings=("big-part",)),
        }
    )
    assert broken(one, here(tmp_path)) == (
        '`big-part` is not installed; `toolchain = { big-part = "2.0" }` would take it as given'
    )
    assert broken(one, here(tmp_path, {"Big_Thing": "1.0+local"})) == ""
    assert "pins 1.0" in broken(one, here(tmp_path, {"big-thing": "1.0", "big-part": "2.0"}))


def test_a_distribution_that_was_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = recipe(distributions={"toy-compiler": Distribution(identity="")})
    assert broken(one, here(tmp_path)) == ""
    toy.install(tmp_path / "site", monkeypatch)
    assert broken(one, here(tmp_path)) == "`toy-compiler` 1.0 was installed"


def test_a_stray_module_in_front_of_a_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = tmp_path / "stray"
    stray.mkdir()
    monkeypatch.syspath_prepend(stray)
    one = recipe(imported=["msgspec"], lacking=["not_there"])
    assert broken(one, here(tmp_path / "root")) == ""
    (stray / "not_there.py").touch()
    assert broken(one, here(tmp_path / "root")) == "module `not_there` can be imported now"
    (stray / "msgspec.py").touch()
    assert broken(one, here(tmp_path / "root")) == f"`{stray}` has a module `msgspec` now"


# --- encoding and the lookup key


def test_encoding_is_canonical_and_another_schema_is_none() -> None:
    one = recipe(files={"b": "2", "a": "1"})
    assert decode(encode(one)) == one
    assert decode(encode(msgspec.structs.replace(one, schema=0))) is None
    assert decode(encode(msgspec.structs.replace(one, key="0" * 64))) is None
    assert decode(b"{") is None
    assert decode(b"\xff") is None


def test_the_lookup_key_is_the_same_in_another_checkout(tmp_path: Path) -> None:
    keys = set()
    for name in ("one", "two"):
        project = load_settings(toy_project(tmp_path / name))
        keys.add(lookup(project))
    assert len(keys) == 1
    moved = msgspec.structs.replace(project, python_path=project.python_path[::-1])
    assert lookup(moved) not in keys
    assert lookup(project, target="sm_90") not in keys
    assert lookup(project, ambient={"TOY_X": "1"}) not in keys


def toy_project(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "src").mkdir()
    (root / "pyproject.toml").write_text(toy.PYPROJECT.replace('"toy"\n\n', '"toy"\n', 1))
    (root / "pyproject.toml").write_text(toy.PYPROJECT.replace('compiler = "toy"\n', ""))
    return root


def lookup(project: object, target: str = "cpu", ambient: dict[str, str] | None = None) -> str:
    return lookup_key(
        project.units[0],  # type: ignore[attr-defined]
        Target(target),
        root=project.root,  # type: ignore[attr-defined]
        python_path=project.python_path,  # type: ignore[attr-defined]
        ambient=ambient or {},
        version="0",
    )


# --- in a build

READS = """
import os
from toy.part import N

def build(target):
    return f"{N} {os.environ.get('WIDTH', '')} {target}"
"""


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    toy.install(tmp_path / "site", monkeypatch)
    monkeypatch.delenv("WIDTH", raising=False)
    return toy.write_project(tmp_path / "repo", unit=READS, part="N = 1")


def built(root: Path, mode: str = "build") -> Build:
    project = load_settings(root)
    with open_cache(project.cache) as cache:
        return build(project, cache, mode=mode)  # type: ignore[arg-type]


def derived(root: Path, mode: str = "build") -> tuple[str, bool]:
    """The state of the one outcome, and whether a worker was started for it."""
    events = []
    project = load_settings(root)
    with open_cache(project.cache) as cache:
        result = build(project, cache, mode=mode, report=events.append)  # type: ignore[arg-type]
    return result.outcomes[0].state, any(event.what == "deriving" for event in events)


def test_a_hit_starts_no_worker_and_a_switch_back_hits_at_once(repo: Path) -> None:
    part = repo / "src/toy/part.py"
    assert derived(repo) == ("compiled", True)
    assert derived(repo) == ("cached", False)
    part.write_text("N = 2")
    assert derived(repo) == ("compiled", True)
    part.write_text("N = 1")
    assert derived(repo) == ("cached", False)
    part.write_text("N = 2")
    assert derived(repo) == ("cached", False)
    part.write_text("N = 2  # the graph is the same")
    assert derived(repo) == ("cached", True)
    assert derived(repo) == ("cached", False)


def test_a_miss_names_the_file_and_the_variable(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(repo)
    (repo / "src/toy/part.py").write_text("N = 3")
    (outcome,) = built(repo, "require-hit").outcomes
    assert outcome.state == "missed"
    assert outcome.reason.endswith("(`src/toy/part.py` changed)")
    (repo / "src/toy/part.py").write_text("N = 1")
    monkeypatch.setenv("WIDTH", "4")
    (outcome,) = built(repo, "require-hit").outcomes
    assert outcome.reason.endswith("(environment `WIDTH` set)")


def test_the_compilers_own_variables_are_a_part_of_the_key(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(repo)
    monkeypatch.setenv("TOY_LEVEL", "3")
    (outcome,) = built(repo, "require-hit").outcomes
    assert outcome.reason == "environment `TOY_LEVEL` set"
    built(repo)
    monkeypatch.delenv("TOY_LEVEL")
    assert derived(repo) == ("cached", False)


def test_status_says_what_always_derives(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from max_build.cli import main

    (repo / "src/toy/part.py").write_text("import time\nN = int(time.time()) * 0")
    assert derived(repo) == ("compiled", True)
    assert derived(repo) == ("cached", True)
    assert main(["-C", str(repo), "status"]) == 0
    said = capsys.readouterr().out
    assert "hit" in said
    assert "always derive: `src/toy/part.py` reads the clock" in said


def test_a_machine_without_the_compiler_hits_where_it_is_pinned(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter stays; what goes is the distribution that its keys name."""
    text = toy.ADAPTER.replace('("toy-compiler",)', '("toy-engine",)')
    site = tmp_path / "site"
    toy.write_distribution(site, "toy-engine", "5.0", {"toy_engine.py": ""})
    toy.write_distribution(
        site,
        "toy-compiler",
        "1.0",
        {"toy_compiler.py": text},
        "[max_build.compilers]\ntoy = toy_compiler:ToyCompiler\n",
    )
    toy.forget()
    assert derived(repo) == ("compiled", True)
    shutil.rmtree(site / "toy_engine-5.0.dist-info")
    toy.forget()
    (outcome,) = built(repo, "require-hit").outcomes
    assert outcome.state == "missed"
    assert 'toolchain = { toy-engine = "5.0" }' in outcome.reason
    with (repo / "pyproject.toml").open("a") as file:
        file.write('\n[tool.max-build.toolchain]\ntoy-engine = "5.0"\n')
    assert derived(repo) == ("cached", False)


def test_a_colleagues_recipe_serves_from_a_shared_directory(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "team").mkdir()
    monkeypatch.setenv("MAX_BUILD_SHARED", str(tmp_path / "team"))
    assert derived(repo) == ("compiled", True)
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(tmp_path / "another"))
    moved = tmp_path / "elsewhere" / "checkout"
    shutil.copytree(repo, moved)
    assert derived(moved) == ("cached", False)
    monkeypatch.delenv("MAX_BUILD_SHARED")
    assert derived(moved) == ("cached", False)


def test_an_all_hit_build_imports_no_compiler_and_nothing_of_the_project(
    project: Path, toy_cache: Path
) -> None:
    code = (
        "import resource, sys\n"
        "from max_build.cli import main\n"
        "assert main(['build', '--require-hit']) == 0\n"
        "heavy = {'max', 'mojo', 'numpy', 'toy', 'torch', 'safetensors'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
        "print(*[line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line])\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    modules, kilobytes, of_children = done.stdout.splitlines()
    assert modules == "[]"
    assert int(kilobytes) < 60 << 10
    assert float(of_children) == 0.0  # no worker


# --- soundness

UNIT = """
import glob, os
import helper
from toy import part
try:
    import maybe_lib
except ImportError:
    maybe_lib = None
import outer_lib

def build(target):
    parts = [f"{name}={open(name).read()}" for name in sorted(glob.glob("parts/*.txt"))]
    return repr((
        part.VALUE, helper.VALUE, outer_lib.VALUE, getattr(maybe_lib, "VALUE", None), parts,
        os.environ.get("WIDTH"), os.path.exists("switch"), os.path.isdir("switch"),
    ))
"""
HELPERS = ["helper.py", "src/helper.py", "src/helper/__init__.py", "src/helper/other.py"]
VALUES = st.integers(0, 2)


class Recalling(RuleBasedStateMachine):
    """Edits at random: a recipe that holds always leads to what a derivation would."""

    @initialize()
    def start(self) -> None:
        self.monkeypatch = pytest.MonkeyPatch()
        self.base = Path(tempfile.mkdtemp())
        toy.install(self.base / "site", self.monkeypatch)
        self.root = toy.write_project(self.base / "repo", unit=UNIT, part="VALUE = 0")
        (self.root / "helper.py").write_text("VALUE = 0")
        (self.root / "parts").mkdir()
        self.install_outer(0)
        self.cache = open_cache(CacheSettings(dir=str(self.base / "cache")))

    def teardown(self) -> None:
        if hasattr(self, "base"):
            self.cache.close()
            self.monkeypatch.undo()
            shutil.rmtree(self.base)

    @rule(value=VALUES, keep_time=st.booleans())
    def edit_part(self, value: int, keep_time: bool) -> None:
        path = self.root / "src/toy/part.py"
        before = path.stat()
        path.write_text(f"VALUE = {value}")
        if keep_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    @rule(name=st.sampled_from(HELPERS), value=VALUES)
    def write_helper(self, name: str, value: int) -> None:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"VALUE = {value}")

    @rule(name=st.sampled_from(HELPERS[1:]))
    def remove_helper(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    @rule()
    def remove_helper_package(self) -> None:
        shutil.rmtree(self.root / "src/helper", ignore_errors=True)

    @rule(name=st.sampled_from(["a", "b"]), value=st.none() | VALUES)
    def write_a_part(self, name: str, value: int | None) -> None:
        path = self.root / "parts" / f"{name}.txt"
        if value is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(str(value))

    @rule(value=st.none() | VALUES)
    def set_width(self, value: int | None) -> None:
        if value is None:
            os.environ.pop("WIDTH", None)
        else:
            self.monkeypatch.setenv("WIDTH", str(value))

    @rule(what=st.sampled_from(["absent", "file", "directory"]))
    def turn_switch(self, what: str) -> None:
        path = self.root / "switch"
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        if what != "absent":
            path.touch() if what == "file" else path.mkdir()

    @rule(value=VALUES)
    def install_outer(self, value: int) -> None:
        files = {"outer_lib.py": f"VALUE = {value}"}
        toy.write_distribution(self.base / "site", "outer-lib", f"1.{value}", files)

    @rule(value=st.none() | VALUES)
    def install_maybe(self, value: int | None) -> None:
        site = self.base / "site"
        for old in site.glob("maybe_lib*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        if value is not None:
            toy.write_distribution(
                site, "maybe-lib", f"1.{value}", {"maybe_lib.py": f"VALUE = {value}"}
            )

    @invariant()
    def recipe_and_derivation_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        toy.forget()
        project = load_settings(self.root)
        unit, target = project.units[0], Target("cpu")
        recalled = Recall(project, self.cache).key(unit, target)
        full = toy.derive(self.root)
        assert full.always == ""
        assert full.recipe is not None
        assert recalled in ("", key_of(full.components))
        if not recalled:
            Recall(project, self.cache).remember(unit, target, full.recipe)
        assert Recall(project, self.cache).key(unit, target) == key_of(full.components)


Recalling.TestCase.settings = settings(
    max_examples=5,
    stateful_step_count=8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


TestRecalling = Recalling.TestCase


class TestRecallingAtLength(Recalling.TestCase):
    settings = settings(Recalling.TestCase.settings, max_examples=40, stateful_step_count=25)


TestRecallingAtLength = pytest.mark.slow(TestRecallingAtLength)
