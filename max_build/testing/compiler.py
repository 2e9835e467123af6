"""What every compiler adapter must do, as tests to inherit.

    class TestMyCompiler(CompilerContract):
        compiler = "mine"
        targets = ("sm_80", "sm_90a")
        files = {"kernels/scale.mine": "…"}
        unit = {"source": "kernels/scale.mine"}
        edits = ({"kernels/scale.mine": "…"},)
        broken = {"kernels/scale.mine": "…"}
        options = ({"options": {"fast": True}},)
        wrong = {"options.fast": {"options": {"fast": "very"}}}
        heavy = ("my_compiler",)

The adapter is found as a build finds it: by its entry point, so its distribution has to be
installed. It works in processes of its own, on projects that the contract writes.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from max_build import compilers, distributions
from max_build.compilers.cubin import check_cubin
from max_build.compilers.mef import check_mef
from max_build.errors import ConfigError
from max_build.key import KEY_SCHEMA, Components, canonical, changes, key_of
from max_build.outcomes import Outcome
from max_build.pipeline import build
from max_build.record import Role
from max_build.store import open_cache
from max_build.target import KNOWN_TARGETS
from max_build.testing.probe import Answer, write
from max_build.testing.trials import UNIT, Trials

__all__ = ["CompilerContract"]

_TRIALS = pytest.StashKey[Trials]()
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ABSOLUTE = re.compile(r"(?<![\w.:/-])/[\w.+-]+(?:/[\w.+-]+)*")


class CompilerContract:
    """Inherit, and say what to try the adapter on. What has a default may be left out.

    Attributes
    ----------
    compiler
        The adapter's name, as in `compiler = …`.
    kind
        What the unit is.
    targets
        Some that it accepts, two where it accepts more than one; the first is what most is tried
        with.
    files
        The project, by path: small, and without a `pyproject.toml`.
    unit
        The keys of the unit's table, `compiler` and `targets` aside.
    edits
        Files to write over the project's, each of which has to change the key. What the first
        leaves has to compile.
    harmless
        The same for edits that must not change it. An unrelated file is always tried.
    options
        Keys to set in the unit's table, each of which has to give a key of its own.
    wrong
        A key within the table → keys to set, so that the adapter has something to say about it.
    broken
        Files that do not compile; the message has to name one of them.
    heavy
        Modules that make up the compiler, which are only loaded where it is needed.
    reproducible
        Whether two compiles give the same bytes. If not, say why beside it.
    """

    compiler: str
    kind: Literal["graph", "kernel"] = "kernel"
    targets: Sequence[str]
    files: Mapping[str, str]
    unit: Mapping[str, Any]
    edits: Sequence[Mapping[str, str]]
    harmless: Sequence[Mapping[str, str]] = ()
    options: Sequence[Mapping[str, Any]] = ()
    wrong: Mapping[str, Mapping[str, Any]] = {}
    broken: Mapping[str, str]
    heavy: Sequence[str] = ()
    reproducible: bool = True

    @pytest.fixture
    def trials(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Trials:
        """The adapter at work; what more than one test looks at is kept for the class."""
        stash: pytest.Stash = request.node.getparent(pytest.Class).stash
        if _TRIALS not in stash:
            stash[_TRIALS] = Trials(type(self), tmp_path_factory.mktemp("contract"))
        return stash[_TRIALS]

    # --- the adapter and its declarations

    def test_it_says_what_it_takes(self, trials: Trials) -> None:
        adapter = trials.adapter
        assert adapter.name == self.compiler
        assert compilers.takes(adapter, self.kind)
        assert set(getattr(adapter, "kinds", ())) <= {"graph", "kernel"}
        assert set(adapter.accepts) <= set(KNOWN_TARGETS)
        assert set(self.targets) <= {str(one) for one in adapter.accepts}
        assert isinstance(adapter.runs_user_code, bool)
        assert isinstance(adapter.one_job_per_process, bool)
        if len(adapter.accepts) > 1:
            assert len(set(self.targets)) > 1, "name two `targets`: it accepts more than one"

    def test_loading_it_loads_no_compiler(self, trials: Trials) -> None:
        unknown = [name for name in self.heavy if find_spec(name) is None]
        assert not unknown, f"`heavy` names {unknown}, which cannot be imported here"
        before, after = trials.compiled.answer.loaded
        assert not before, "making the adapter, `problems` or `ambient` imports it"
        if not trials.adapter.runs_user_code:
            assert not after, "`derive` imports it, in the build process"

    def test_a_good_declaration_has_no_problem(self, trials: Trials) -> None:
        for table in ({}, *self.options):
            settings = trials.settings(trials.here.project(table=table))
            assert list(trials.adapter.problems(settings.unit(UNIT))) == []

    def test_a_wrong_declaration_is_told_by_its_key(self, trials: Trials) -> None:
        for key, table in self.wrong.items():
            with pytest.raises(ConfigError) as caught:
                trials.settings(trials.here.project(table=table))
            where = rf"`tool\.max-build\.{self.kind}s\.{UNIT}\.([^`]+)` \S"
            assert set(re.findall(where, str(caught.value))) == {key}, str(caught.value)

    # --- what decides the key

    def test_the_components_are_filled(self, trials: Trials) -> None:
        for target, answer in trials.per_target.items():
            found = _components(answer)
            assert found.schema == KEY_SCHEMA
            assert found.target == target
            assert found.compiler
            assert all(found.compiler.values()), "a compiler counts by its full build"
            assert found.sources
            assert all(_DIGEST.fullmatch(one) for one in found.sources.values())

    def test_two_machines_make_one_key(self, trials: Trials) -> None:
        here, there = trials.compiled.answer, trials.compiled_elsewhere.answer
        _same(here, there)
        assert here.ir == there.ir

    def test_a_process_derives_the_same_again(self, trials: Trials) -> None:
        if trials.adapter.one_job_per_process:
            pytest.skip("a process of it has one job")
        root = trials.here.project()
        tasks = [trials.here.task(root=root), trials.here.task(root=root), trials.here.task()]
        for answer in trials.here.run(*tasks):
            _same(trials.compiled.answer, answer)

    def test_nothing_of_the_machine_is_in_the_components(self, trials: Trials) -> None:
        answer = trials.compiled_elsewhere.answer
        held = [canonical(_components(answer)), answer.ir or b"", canonical(answer.ambient)]
        text = "\n".join(one.decode(errors="replace") for one in held)
        for name in (*trials.elsewhere.names(), *_host()):
            assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text), name
        leaves = (leaf for one in changes(_NOTHING, _components(answer)) for leaf in one)
        paths = [path for leaf in leaves for path in _ABSOLUTE.findall(leaf)]
        assert not [path for path in paths if Path(path).exists()]

    def test_each_target_has_a_key(self, trials: Trials) -> None:
        _distinct(trials.per_target)

    def test_each_option_has_a_key(self, trials: Trials) -> None:
        tasks = [trials.here.task(table=table) for table in self.options]
        named = [str(dict(table)) for table in self.options]
        _distinct(
            {
                "the unit as it stands": trials.compiled.answer,
                **dict(zip(named, trials.here.run(*tasks), strict=True)),
            }
        )

    def test_an_edited_source_has_a_key(self, trials: Trials) -> None:
        tasks = [trials.here.task(edit) for edit in self.edits]
        named = [f"edit {number}: {', '.join(edit)}" for number, edit in enumerate(self.edits, 1)]
        edited = trials.here.run(*tasks)
        _distinct(
            {
                "the project as it stands": trials.compiled.answer,
                **dict(zip(named, edited, strict=True)),
            }
        )

    def test_what_was_remembered_of_a_file_is_checked(self, trials: Trials) -> None:
        # One process, one memory, one path: what a `watch` or a server of builds does.
        if trials.adapter.one_job_per_process:
            pytest.skip("a process of it has one job")
        root, files = trials.here.project(), dict(self.files)
        tasks = [
            trials.here.task(root=root, before=before)
            for before in ({}, dict(self.edits[0]), files)
        ]
        before, edited, after = trials.here.process(*tasks)
        _same(before, after)
        _distinct({"before": before, "edited in its place": edited})

    def test_what_does_not_matter_keeps_the_key(self, trials: Trials) -> None:
        tasks = [trials.here.task(edit) for edit in ({"unrelated.txt": "…\n"}, *self.harmless)]
        if self.kind == "graph":  # a file brings them, long after the compile
            tasks.append(trials.here.task(table={"weights": "w.safetensors"}))
        for answer in trials.here.run(*tasks):
            _same(trials.compiled.answer, answer)

    def test_it_answers_for_what_the_compiler_takes_from_the_machine(self, trials: Trials) -> None:
        adapter = trials.adapter
        if not isinstance(adapter, compilers.Direct):
            pytest.skip("it has no `distributions` and `ambient`: its units get no recipes")
        assert adapter.runs_user_code, "what is keyed in the build process needs no recipe"
        named = {distributions.normalise(name) for name in adapter.distributions}
        found = _components(trials.compiled.answer).compiler
        assert found.keys() <= named, "`components.compiler` names others than `distributions`"
        assert found == distributions.identities(adapter.distributions)
        assert trials.compiled.answer.ambient == trials.compiled_elsewhere.answer.ambient

    # --- what comes out

    def test_an_artifact_lies_below_the_scratch_directory(self, trials: Trials) -> None:
        tried = trials.compiled
        files = _compiled(tried.answer).files
        assert files
        assert files.keys() <= set(get_args(Role)) - {"sources"}
        for path in (Path(name) for names in files.values() for name in names):
            assert path.resolve().is_relative_to(tried.scratch), path
            assert path.is_file(), path
            assert path.stat().st_size, f"{path} is empty"
        assert not tried.left, "it leaves temporary files outside of the scratch directory"

    def test_machine_code_is_for_its_target(self, trials: Trials) -> None:
        for target, answer in trials.per_target.items():
            lowered = {one.lowered for one in _compiled(answer).kernels.values()}
            found = {one for path in _files(answer, "cubin") for one in _entries(path, target)}
            assert not found or lowered <= found, "a kernel is in none of its cubins"
            for path in _files(answer, "mef"):
                check_mef(path.read_bytes(), target)

    def test_a_product_says_what_is_in_it(self, trials: Trials) -> None:
        answer = _compiled(trials.compiled.answer)
        tensors = (*answer.inputs, *answer.outputs, *answer.weights)
        if self.kind == "graph":
            assert not answer.kernels, "a graph has no kernels"
            assert answer.outputs or not _files(answer, "mef"), "a graph has outputs"
            return
        assert not tensors, "a kernel module has no inputs, outputs or weights"
        assert answer.kernels
        assert all(one.lowered for one in answer.kernels.values())
        assert set(self.unit.get("names", ())) <= answer.kernels.keys()
        cubins = answer.digests.get("cubin", ())
        blobs = {one.blob for one in answer.kernels.values()}
        assert blobs <= {"", *cubins}, "`Kernel.blob` is the digest of a cubin"
        assert len(cubins) < 2 or "" not in blobs, "it does not say which cubin a kernel lies in"

    def test_two_compiles_give_the_same_bytes(self, trials: Trials) -> None:
        if not self.reproducible:
            pytest.skip("its author says that they differ")
        here, there = trials.compiled.answer, trials.compiled_elsewhere.answer
        assert _compiled(here).digests == _compiled(there).digests
        assert here.kernels == there.kernels

    def test_what_was_derived_is_what_is_compiled(self, trials: Trials) -> None:
        # An artifact of other bytes than those that were hashed would be wrong for ever after.
        task = trials.here.task(compiles=True, between=dict(self.edits[0]))
        (answer,) = trials.here.run(task)
        if answer.uncacheable or (answer.error and answer.error[0] == "CompileError"):
            return  # it noticed
        _same(trials.compiled.answer, answer)
        if self.reproducible:
            assert answer.digests == trials.compiled.answer.digests

    # --- what it leaves alone, and how it fails

    def test_a_broken_source_is_a_compile_error(self, trials: Trials) -> None:
        tried = trials.broken
        assert tried.answer.error, "it compiles"
        kind, told = tried.answer.error
        assert kind == "CompileError", told
        assert any(Path(name).name in told for name in self.broken), told
        assert str(tried.scratch) not in told, told
        assert not tried.left, "it leaves temporary files outside of the scratch directory"

    def test_nothing_is_written_in_the_project(self, trials: Trials) -> None:
        for tried in (trials.compiled, trials.broken):
            assert not tried.wrote

    def test_the_process_is_left_as_it_was(self, trials: Trials) -> None:
        if trials.adapter.one_job_per_process:
            pytest.skip("its process is not used again")
        for tried in (trials.compiled, trials.broken):
            assert not tried.answer.touched

    # --- in whole builds

    def test_a_build_misses_then_hits_and_an_edit_misses(self, trials: Trials) -> None:
        root = trials.here.project()
        first, again = _built(trials, root), _built(trials, root)
        assert first.state == "compiled", _told(first)
        assert first.record
        # The home is the user's own here, and what lies there may count.
        differ = changes(_components(trials.compiled.answer), first.record.components)
        assert not [one for one in differ if not one[0].startswith("environment.")]
        assert (again.state, again.key) == ("cached", first.key), _told(again)
        assert again.record == first.record
        write(root, dict(self.edits[0]))
        edited = _built(trials, root)
        assert edited.state == "compiled", _told(edited)
        assert edited.key != first.key
        write(root, dict(self.files))
        assert _built(trials, root).key == first.key


_NOTHING = Components(compiler={}, target="", sources={})


def _compiled(answer: Answer) -> Answer:
    """The same, if nothing was raised."""
    assert answer.error is None, answer.error[1]
    return answer


def _components(answer: Answer) -> Components:
    """What was derived, which is to be kept."""
    assert answer.error is None, answer.error[1]
    assert answer.components is not None
    assert not answer.uncacheable, f"the unit would not be kept: {answer.uncacheable}"
    return answer.components


def _same(first: Answer, second: Answer) -> None:
    """The components, and with them the keys, are the same."""
    assert changes(_components(first), _components(second)) == ()


def _distinct(answers: Mapping[str, Answer]) -> None:
    """Each has a key of its own."""
    keys: dict[str, str] = {}
    for name, answer in answers.items():
        other = keys.setdefault(key_of(_components(answer)), name)
        assert other == name, f"one key for two: {other} | {name}"


def _host() -> Iterable[str]:
    """The name of this machine, where it is not a word that may stand anywhere."""
    name = socket.gethostname()
    return () if name.startswith("localhost") or len(name) < 4 else (name,)


def _files(answer: Answer, role: Role) -> list[Path]:
    return [Path(name) for name in answer.files.get(role, ())]


def _entries(cubin: Path, target: str) -> tuple[str, ...]:
    return tuple(check_cubin(cubin.read_bytes(), target).entry_points)


def _built(trials: Trials, root: Path) -> Outcome:
    """What one build makes of the project."""
    settings = trials.settings(root)
    with open_cache(settings.cache) as cache:
        (outcome,) = build(settings, cache).outcomes
    return outcome


def _told(outcome: Outcome) -> str:
    return str(outcome.error or outcome.reason)
