"""`max-build run`: MAX programs through the cache, unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from programs import run_under

from max_build.runtime.transparent import SITE, environment

PROGRAM = """
import sys
import numpy as np
from max import driver, engine
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, Weight, ops

def graph(factor):
    with Graph("scaled", input_types=[TensorType(DType.float32, ["n"], DeviceRef.CPU())]) as g:
        bias = Weight("bias", DType.float32, [1], DeviceRef.CPU())
        g.output(g.inputs[0].tensor * factor + bias)
    return g

x = np.arange(3, dtype=np.float32)
weights = {"bias": np.ones(1, np.float32)}
"""
LOAD = """
session = engine.InferenceSession(devices=[driver.CPU()])
model = session.load(graph(2.0), weights_registry=weights)
assert model.execute(x)[0].to_numpy().tolist() == [1.0, 3.0, 5.0]
try:
    session.load(graph(2.0))
except ValueError as error:
    assert "not in the weights registry" in str(error)
else:
    raise AssertionError("a missing weight has to be refused on a hit as well")
"""


def test_a_second_run_compiles_nothing_and_gives_the_same(tmp_path: Path) -> None:
    first = run_under(tmp_path, PROGRAM + LOAD)
    assert first.returncode == 0, first.stderr
    # the second load of one run misses too: what is compiled is published when it is done
    assert "max-build: 1 cached, 1 compiled" in first.stderr
    second = run_under(tmp_path, PROGRAM + LOAD)
    assert second.returncode == 0, second.stderr
    assert "max-build: 2 cached" in second.stderr


@pytest.mark.slow
def test_what_a_session_holds_is_a_part_of_the_key(tmp_path: Path) -> None:
    variants = {
        "plain": "",
        "define": "session.set_mojo_assert_level(engine.api.AssertLevel.ALL)",
        "debug": "engine.InferenceSession.debug.nan_check = True",
    }
    code = """
    session = engine.InferenceSession(devices=[driver.CPU()])
    {}
    session.compile(graph(2.0))
    """
    for change in variants.values():
        done = run_under(tmp_path, PROGRAM + textwrap.dedent(code).format(change))
        assert "max-build: 1 compiled" in done.stderr, done.stderr
    for change in variants.values():
        done = run_under(tmp_path, PROGRAM + textwrap.dedent(code).format(change))
        assert "max-build: 1 cached" in done.stderr, done.stderr
    done = run_under(tmp_path, PROGRAM + textwrap.dedent(code).format(""), "--host", "x86-64-v2")
    assert "max-build: 1 compiled" in done.stderr, done.stderr


@pytest.mark.slow
def test_how_values_are_shown_is_no_part_of_the_key(tmp_path: Path) -> None:
    code = """
    from max._core.engine import PrintStyle
    engine.InferenceSession.debug.print_style = PrintStyle.{}
    session = engine.InferenceSession(devices=[driver.CPU()])
    session.compile(graph(2.0))
    """
    for style, said in (("NONE", "1 compiled"), ("FULL", "1 cached")):
        done = run_under(tmp_path, PROGRAM + textwrap.dedent(code).format(style))
        assert f"max-build: {said}" in done.stderr, done.stderr


@pytest.mark.slow
def test_modules_async_compiles_and_maxs_own_stores_go_on_working(tmp_path: Path) -> None:
    code = PROGRAM + textwrap.dedent(
        """
        import pathlib
        from max.graph import Module
        module = Module()
        for name, factor in (("one", 2.0), ("two", 3.0)):
            kind = TensorType(DType.float32, ["n"], DeviceRef.CPU())
            with Graph(name, input_types=[kind], module=module) as g:
                g.output(g.inputs[0].tensor * factor)
        session = engine.InferenceSession(devices=[driver.CPU()])
        models = session.init_all(session.compile(module))
        assert models["two"].execute(x)[0].to_numpy().tolist() == [0.0, 3.0, 6.0]
        pending = session.compile_async(graph(4.0))
        model = session.init(pending, weights_registry=weights)
        assert model.execute(x)[0].to_numpy().tolist() == [1.0, 5.0, 9.0]
        folder = pathlib.Path("mefs")
        saving = engine.InferenceSession(devices=[driver.CPU()], export_mefs=folder)
        saving.load(graph(4.0), weights_registry=weights)
        reading = engine.InferenceSession(devices=[driver.CPU()], precompiled_mefs=folder)
        model = reading.load(graph(4.0), weights_registry=weights)
        assert model.execute(x)[0].to_numpy().tolist() == [1.0, 5.0, 9.0]
        """
    )
    first = run_under(tmp_path, code)
    assert first.returncode == 0, first.stderr
    assert "2 compiled" in first.stderr
    second = run_under(tmp_path, code)
    assert second.returncode == 0, second.stderr
    assert "3 cached" in second.stderr
    assert "compiled," not in second.stderr.replace("it is compiled already", "")


def test_a_max_that_is_not_known_is_left_alone_with_one_line(tmp_path: Path) -> None:
    package = tmp_path / "other" / "max"
    for name in ("engine", "driver", "graph"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("__version__ = '99.1'\n")
    (package / "__init__.py").touch()
    (package / "graph" / "graph.py").touch()
    (package / "engine" / "api.py").write_text(
        "class InferenceSession:\n    def compile(self, model): return 'compiled'\n"
    )
    done = run_under(
        tmp_path,
        """
        from max.engine.api import InferenceSession
        print(InferenceSession().compile(None))
        """,
        PYTHONPATH=str(tmp_path / "other"),
    )
    assert done.stdout == "compiled\n", done.stderr
    assert done.stderr.count("MAX 99.1 is not known to `max-build run`") == 1


def test_child_processes_are_reached_and_the_environments_own_sitecustomize_runs(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys; sys.own_sitecustomize = True\n")
    done = run_under(
        tmp_path,
        """
        import subprocess, sys
        child = "import sys; print(sys.own_sitecustomize, " \\
            "any(type(one).__name__ == 'Finder' for one in sys.meta_path))"
        print(subprocess.check_output([sys.executable, "-c", child], text=True))
        """,
        PYTHONPATH=str(site),
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_sitecustomize_that_is_not_there_or_fails_is_as_without_us(tmp_path: Path) -> None:
    def started(path: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-c", "import sitecustomize"]
        environ = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    assert started(SITE).stderr == ""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.path.append('/own')\n1 / 0\n")
    assert "ZeroDivisionError" in started(os.pathsep.join((SITE, str(tmp_path)))).stderr


def test_a_process_that_never_imports_max_imports_next_to_nothing_of_ours(tmp_path: Path) -> None:
    done = run_under(
        tmp_path,
        """
        import sys
        print(*sorted(name for name in sys.modules if name.startswith("max_build")))
        print(*sorted({"diskcache", "max", "msgspec", "numpy"} & sys.modules.keys()))
        """,
    )
    assert done.stdout.splitlines() == ["max_build_run", ""]


def test_the_environment_of_a_command() -> None:
    found = environment({"PYTHONPATH": "/a"}, host="x86-64-v3")
    assert found["PYTHONPATH"] == os.pathsep.join((SITE, "/a"))
    assert environment(found)["PYTHONPATH"] == found["PYTHONPATH"]


def test_a_command_that_is_not_there_or_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from max_build.cli import main

    assert main(["run", "--", "no-such-command-at-all"]) == 127
    (tmp_path / "notes.txt").write_text("no program\n")
    (tmp_path / "empty").touch(mode=0o755)
    for name, why in {
        "notes.txt": "Permission denied",
        ".": "Is a directory",
        "empty": "Exec format error",
    }.items():
        assert main(["run", "--", f"{tmp_path}/{name}"]) == 126
        assert f"{name}` cannot be run: {why}" in capsys.readouterr().err
    for wrong, told in {
        ("run",): "`max-build run` needs a command",
        ("run", "--host", "pentium", "--", "true"): "must be one of generic",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


LIBRARIES = """
import os, pathlib
from max import driver, engine
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from max_build.runtime.session_keys import Pass, asked_for, changed

ops = pathlib.Path("toy", "ops")
ops.mkdir(parents=True)

def write(n):
    (ops / "__init__.mojo").write_text(f"def answer() -> Int:\\n    return {n}\\n")

def graph(*libraries):
    kind = TensorType(DType.float32, [4], DeviceRef.CPU())
    with Graph("g", input_types=[kind], custom_extensions=list(libraries)) as g:
        g.output(g.inputs[0].tensor + 1)
    return g

def session(*libraries):
    return engine.InferenceSession(devices=[driver.CPU()], custom_extensions=libraries or None)

def ask(session, graph, *libraries):
    try:
        return asked_for(session, graph, libraries or None, False)
    except Pass as reason:
        return str(reason)
"""


def test_a_library_is_keyed_by_what_was_loaded(tmp_path: Path) -> None:
    code = LIBRARIES + textwrap.dedent(
        """
        write(1)
        held, built = session(ops), graph(ops)
        one, two = ask(held, graph()), ask(session(), built)
        assert one.components.dependencies.keys() == {"session.extension.1"}
        assert two.components.dependencies.keys() == {"library.1"}
        assert not changed(one.libraries) and not changed(two.libraries)
        three = ask(session(), graph(), ops)
        assert three.components.dependencies.keys() == {"compile.extension.1"}

        write(2)
        assert ask(held, graph()) == "kernel library `ops` changed since MAX compiled it"
        assert changed(one.libraries) and not changed(two.libraries) and changed(three.libraries)
        new = ask(session(), graph(), ops)
        assert new.components != three.components
        assert ask(session(ops), graph()).components != one.components

        pid = os.fork()
        if not pid:  # what another process does that builds the same graph
            write(3)
            graph(ops)
            os._exit(0)
        os.waitpid(pid, 0)
        assert ask(session(), built) == "kernel library `ops` was compiled anew meanwhile"
        assert changed(two.libraries)
        print("done", flush=True)
        os._exit(0)
        """
    )
    done = run_under(tmp_path, code)
    assert done.stdout == "done\n", done.stderr


def test_a_compiled_library_beside_others_is_left_to_max(tmp_path: Path) -> None:
    code = LIBRARIES + textwrap.dedent(
        """
        import shutil
        write(1)
        pathlib.Path("lib").mkdir()
        library = pathlib.Path(shutil.copy(graph(ops).kernel_libraries_paths[0], "lib"))
        alone = ask(session(), graph(), library)
        assert alone.components.dependencies.keys() == {"compile.extension.1"}
        shutil.copy(library, "lib/sib.mojoc")
        for asked in (ask(session(), graph(), library), ask(session(), graph(library))):
            assert asked.startswith("beside kernel library `mojo_pkg_"), asked
            assert asked.endswith("are others, which MAX's own cache ignores"), asked
        print("done", flush=True)
        os._exit(0)
        """
    )
    done = run_under(tmp_path, code)
    assert done.stdout == "done\n", done.stderr
