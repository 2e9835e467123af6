"""Whoever asks, and however: what differs next time either breaks a recipe or rules one out."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import toy_repo as toy
from max_build.config import load_settings
from max_build.key import digest
from max_build.recipes.recipe import broken
from max_build.recipes.surroundings import Here
from max_build.workers import environment

Deriver = Callable[..., toy.Derived]
PACKAGE = Path(environment.__code__.co_filename).parent.parent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "repo"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return toy.install(tmp_path / "site-packages", monkeypatch)


@pytest.fixture
def derive(root: Path, site: Path) -> Deriver:
    def derived(unit: str, **modules: str) -> toy.Derived:
        return toy.derive(toy.write_project(root, unit=unit, **modules))

    return derived


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory among the temporary files, but not of the derivation's making."""
    with tempfile.TemporaryDirectory(dir=tempfile.gettempdir()) as folder:
        yield Path(folder)


def why(found: toy.Derived, root: Path) -> str:
    """Why there is no recipe, or why it holds no more; empty if it does."""
    if found.recipe is None:
        return found.always
    toy.forget()
    settings = load_settings(root)
    now = Here(
        settings.root,
        settings.python_path,
        os.environ,
        lambda path: digest(Path(path).read_bytes()),
        {},
    )
    return broken(found.recipe, now)


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# --- threads, whose frames are the interpreter's alone


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("Path.read_text, Path({outside!r})", "reads `{outside}`, which belongs neither"),
        ("os.path.exists, {outside!r}", "looks at `{outside}`"),
        ("os.listdir, {folder!r}", "looks at `{folder}`"),
        ("subprocess.check_output, ['true']", "starts a program"),
        ("time.time_ns", "reads the clock"),
        ("os.urandom, 4", "draws random bytes"),
        ("os.getuid", "asks for `os.getuid`"),
    ],
)
@pytest.mark.parametrize("started", ["import os", "POOL.submit(len, '').result()"])
def test_what_a_pool_is_given_to_do(
    derive: Deriver, root: Path, temporary: Path, call: str, reason: str, started: str
) -> None:
    """Also by a thread that another job had started."""
    names = {"outside": str(write(temporary / "a.txt")), "folder": str(temporary)}
    found = derive(
        "import os, subprocess, time\n"
        "from pathlib import Path\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "POOL = ThreadPoolExecutor(1)\n"
        f"{started}\n"
        f"def build(target): return str(POOL.submit({call.format(**names)}).result())\n"
    )
    assert reason.format(**names) in why(found, root)


def test_what_a_thread_reads_of_the_environment_and_imports(
    derive: Deriver, root: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "1")
    toy.write_distribution(site, "helper", "1.0", {"helper.py": "N = 1"})
    found = derive(
        """
        import importlib, os
        from concurrent.futures import ThreadPoolExecutor
        def build(target):
            with ThreadPoolExecutor(1) as pool:
                helper = pool.submit(importlib.import_module, "helper").result()
                return next(pool.map(os.getenv, ["WIDTH"])) + str(helper.N)
        """
    )
    assert found.recipe is not None
    assert found.recipe.imported == ("helper",)
    assert why(found, root) == ""
    toy.write_distribution(site, "helper", "2.0", {"helper.py": "N = 2"})
    assert why(found, root) == "`helper` 1.0 → 2.0"
    monkeypatch.setenv("WIDTH", "2")
    assert why(found, root) == "environment `WIDTH` changed"


def test_a_pool_that_only_computes(derive: Deriver, root: Path) -> None:
    found = derive(
        """
        from concurrent.futures import ThreadPoolExecutor
        def build(target):
            with ThreadPoolExecutor() as pool:
                return str(list(pool.map(abs, [-1, 2], timeout=60)))
        """
    )
    assert why(found, root) == ""


# --- temporary files


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return str(os.path.exists({0!r}))", "looks at"),
        ("return str(os.path.exists({0!r} + '.none'))", "looks at"),
        ("return str(os.path.getsize({0!r}))", "looks at"),
        ("return str(os.listdir(os.path.dirname({0!r})))", "looks at"),
        (
            "d = os.open(os.path.dirname({0!r}), 0); return str(os.open('a.txt', 0, dir_fd=d))",
            "descriptor",
        ),
        ("return open({0!r}, 'r+').read()", "belongs neither"),
        ("return open({0!r}, 'a+').read()", "belongs neither"),
        ("t = open({0!r}).read(); os.unlink({0!r}); return t", "belongs neither"),
        ("os.rename({0!r}, {0!r} + '2'); return open({0!r} + '2').read()", "belongs neither"),
        ("os.unlink({0!r}); return ''", "looks at"),
        ("os.mkdir(os.path.dirname({0!r})); return ''", "looks at"),
        (
            "d = tempfile.mkdtemp(); os.symlink({0!r}, d + '/b'); return open(d + '/b').read()",
            "belongs neither",
        ),
        (
            "d = tempfile.mkdtemp(); os.link({0!r}, d + '/b'); return open(d + '/b').read()",
            "belongs neither",
        ),
    ],
)
def test_a_temporary_file_of_somebody_else(
    derive: Deriver, root: Path, temporary: Path, body: str, reason: str
) -> None:
    path = write(temporary / "a.txt", "x")
    body = body.format(str(path)).replace("; ", "\n    ")
    run = f"import os, tempfile\ndef build(target):\n    {body}\n"
    if "mkdir" in body:
        run = run.replace("    os.mkdir", "    try: os.mkdir").replace(
            "\n    return ''", "\n    except OSError: pass\n    return ''"
        )
    assert reason in why(derive(run), root)


def test_a_temporary_file_of_its_own(derive: Deriver, root: Path) -> None:
    found = derive(
        """
        import os, shutil, tempfile
        def build(target):
            with tempfile.TemporaryDirectory() as folder:
                one = os.path.join(folder, "one")
                os.makedirs(os.path.join(folder, "a", "b"))
                shutil.copy("pyproject.toml", one)
                open(one, "r+").close()
                os.rename(one, one + "2")
                os.symlink(one + "2", one)
                names = sorted(os.listdir(folder)), os.path.exists(one), os.path.getsize(one)
                return str((names, open(one).read()))
        """
    )
    assert why(found, root) == ""


def test_what_lies_beside_the_project(derive: Deriver, root: Path) -> None:
    found = derive("import os\ndef build(target): return str(sorted(os.listdir('..')))")
    assert f"looks at `{root.parent}`" in why(found, root)


# --- what is installed


def test_a_module_of_a_namespace_that_is_installed_later(
    derive: Deriver, root: Path, site: Path
) -> None:
    toy.write_distribution(site, "toyns-a", "1.0", {"toyns/a.py": ""})
    toy.write_distribution(site, "regular", "1.0", {"regular/__init__.py": ""})
    found = derive(
        """
        import regular, toyns.a
        def build(target):
            try:
                import toyns.fast
            except ImportError:
                pass
            try:
                import regular.fast
            except ImportError:
                return "slow"
        """
    )
    assert found.recipe is not None
    assert found.recipe.lacking == ("regular.fast", "toyns.fast")
    toy.write_distribution(site, "toyns-fast", "1.0", {"toyns/fast.py": ""})
    assert why(found, root) == "module `toyns.fast` can be imported now"


@pytest.mark.parametrize(
    "body",
    [
        "import pkgutil, toyns; return str(list(pkgutil.iter_modules(toyns.__path__)))",
        "import os, toyns.a; return str(os.listdir(os.path.dirname(toyns.a.__file__)))",
        "import os, toyns.a; return str(os.path.exists(toyns.a.__file__ + '.txt'))",
        "import os, toyns.a; return str(os.listdir(os.path.dirname(toyns.a.__file__) + '/..'))",
    ],
)
def test_looks_at_what_no_one_distribution_decides(
    derive: Deriver, root: Path, site: Path, body: str
) -> None:
    toy.write_distribution(site, "toyns-a", "1.0", {"toyns/a.py": ""})
    found = derive(f"def build(target):\n    {body}\n")
    assert f"looks at `{site}" in why(found, root)


def test_looks_at_what_a_distribution_decides(derive: Deriver, root: Path, site: Path) -> None:
    files = {"regular/__init__.py": "", "regular/data/a.txt": ""}
    toy.write_distribution(site, "regular", "1.0", files)
    found = derive(
        f"""
        import os
        def build(target):
            return str((os.listdir({f"{site}/regular/data"!r}),
                        os.path.exists({f"{site}/regular/data/b.txt"!r})))
        """
    )
    assert why(found, root) == ""
    toy.write_distribution(site, "regular", "2.0", files)
    assert why(found, root) == "`regular` 1.0 → 2.0"


@pytest.mark.parametrize(
    "body", ["str(os.listdir('vendor/site-packages'))", "str(os.path.exists('{0}/z.txt'))"]
)
def test_a_folder_of_the_projects_that_is_called_as_an_installers(
    derive: Deriver, root: Path, body: str
) -> None:
    folder = "vendor/site-packages"
    write(root / folder / "a.txt")
    found = derive(f"import os\ndef build(target): return {body.format(folder)}")
    assert why(found, root) == ""
    write(root / folder / "z.txt")
    assert why(found, root) != ""


def test_distributions_in_a_folder_of_the_project(derive: Deriver, root: Path) -> None:
    write(root / "plugins/a-1.0.dist-info/METADATA", "Name: a\nVersion: 1\n")
    found = derive(
        """
        from importlib.metadata import distributions
        def build(target): return str(sorted(d.name for d in distributions(path=["plugins"])))
        """
    )
    assert why(found, root) == ""
    write(root / "plugins/b-1.0.dist-info/METADATA", "Name: b\nVersion: 1\n")
    assert "`plugins`" in why(found, root)


def test_a_finder_that_knows_a_lacking_module(
    derive: Deriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an editable install brings one."""
    found = derive(
        """
        try:
            import fastlib
        except ImportError:
            fastlib = None
        def build(target): return str(fastlib)
        """
    )
    assert why(found, root) == ""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            return object() if name == "fastlib" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert why(found, root) == "module `fastlib` can be imported now"


# --- permissions


@pytest.mark.parametrize(
    "body",
    [
        "os.access('tools/gen', os.X_OK)",
        "os.stat('tools/gen').st_mode & 0o111",
        "[os.access('tools/gen', os.X_OK), open('tools/gen').read()]",
        "[one.stat().st_mode & 0o111 for one in os.scandir('tools')]",
        "shutil.which('gen', path='tools')",
    ],
)
def test_whether_a_file_may_be_executed(derive: Deriver, root: Path, body: str) -> None:
    path = write(root / "tools/gen")
    path.chmod(0o644)
    found = derive(f"import os, shutil\ndef build(target): return str({body})")
    assert why(found, root) == ""
    path.chmod(0o664)
    assert why(found, root) == ""
    path.chmod(0o755)
    assert why(found, root) == "`tools/gen` may be executed now"


def test_whether_a_file_may_be_written(derive: Deriver, root: Path) -> None:
    found = derive("import os\ndef build(target): return str(os.access('src', os.W_OK))")
    assert "asks for `os.access`" in why(found, root)


# --- clocks and the machine


@pytest.mark.parametrize(
    "code",
    [
        "from datetime import datetime as dt\nX = dt.now()",
        "from datetime import datetime as dt\nX = dt.utcnow()",
        "from datetime import date as day\nX = day.today()",
        "import datetime\nX = getattr(datetime.datetime, 'n' + 'ow')()",
        "class D(__import__('datetime').datetime): pass\nX = D.now()",
        "X = {}\nexec('from datetime import datetime as dt; X = dt.now()', X)",
        "import runpy\nX = runpy.run_path('conf.py')",
        "import helper\nX = helper.stamp()",
        "import numpy as np\nX = np.datetime64('now')",
        "import numpy as np\nX = {}\nexec('import numpy; n = numpy.datetime64(\"now\")', X)",
        "import email.utils\nX = email.utils.formatdate()",
        "import uuid\nX = uuid.uuid1()",
        "import os\nX = os.times()",
        "import asyncio\nL = asyncio.new_event_loop()\nX = L.time()\nL.close()",
        "import io, zipfile\nX = zipfile.ZipFile(io.BytesIO(), 'w').writestr('a', b'')",
        "import timeit\nX = timeit.default_timer()",
    ],
)
def test_every_way_to_the_clock(derive: Deriver, root: Path, site: Path, code: str) -> None:
    write(root / "conf.py", "from datetime import datetime as dt\nX = dt.now()\n")
    helper = "from datetime import datetime as dt\ndef stamp(): return dt.now()\n"
    toy.write_distribution(site, "helper", "1.0", {"helper.py": helper})
    found = derive(f"{code}\ndef build(target): return str(X)\n")
    assert "reads the clock" in why(found, root)


def test_dates_that_are_given(derive: Deriver, root: Path) -> None:
    found = derive(
        """
        from datetime import date, datetime, timezone
        def build(target):
            then = datetime.fromtimestamp(0, timezone.utc), date(2020, 1, 2)
            return str((then, isinstance(then[0], datetime), datetime.strptime("7", "%d")))
        """
    )
    assert why(found, root) == ""


@pytest.mark.parametrize(
    "call",
    [
        "os.getgroups()",
        "os.getpgrp()",
        "os.sysconf('SC_PHYS_PAGES')",
        "shutil.disk_usage('.')",
        "pwd.getpwuid(0)",
        "resource.getrlimit(resource.RLIMIT_STACK)",
        "platform.node()",
        "platform.release()",
        "runpy.run_path('conf.py')",
    ],
)
def test_every_question_about_the_machine(derive: Deriver, root: Path, call: str) -> None:
    write(root / "conf.py", "import os\nN = os.cpu_count()\n")
    imports = "os, platform, pwd, resource, runpy, shutil"
    found = derive(f"import {imports}\nplatform.machine()\ndef build(target): return str({call})\n")
    assert "asks for `" in why(found, root)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("del os.environ['FLAG']", "environment `FLAG` unset"),
        ("os.environ.pop('FLAG', None)", "environment `FLAG` unset"),
        ("posix.environ.get(b'FLAG')", "environment `FLAG` unset"),
        ("os.environ._data.get(b'FLAG')", "reads the whole environment"),
        ("repr(os.environ)", "reads the whole environment"),
        ("len(os.environ)", "reads the whole environment"),
    ],
)
def test_every_way_to_a_variable(
    derive: Deriver, root: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    monkeypatch.setenv("FLAG", "1")
    found = derive(f"import os, posix\n{body}\ndef build(target): return ''")
    monkeypatch.delenv("FLAG")
    assert reason in why(found, root)


# --- what the project tells the compiler


@pytest.mark.parametrize("value", ["{0}/x.bc", "../x.bc", "--options-file={0}/x"])
def test_a_variable_of_the_compilers_that_names_a_place_outside(
    derive: Deriver, root: Path, tmp_path: Path, value: str
) -> None:
    value = value.format(tmp_path)
    setting = f"import os\nos.environ['TOY_LIB'] = {value!r}\n"
    found = derive(f"{setting}def build(target): return ''")
    assert "sets `TOY_LIB` to a place outside the project" in why(found, root)


@pytest.mark.parametrize("setting", ["TOY_LIB=lib/x.bc", "TOY_LIB=3", "OTHER=/none/x.bc"])
def test_variables_that_tell_the_compiler_no_such_place(
    derive: Deriver, root: Path, setting: str
) -> None:
    name, _, value = setting.partition("=")
    found = derive(f"import os\nos.environ[{name!r}] = {value!r}\ndef build(target): return ''")
    assert why(found, root) == ""


# --- what native code reads

NATIVE = """
import ctypes
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
def read(path):
    file = ctypes.c_void_p(libc.fopen(path.encode(), b"r"))
    text = ctypes.create_string_buffer(99)
    libc.fread(text, 1, 99, file)
    libc.fclose(file)
    return text.value.decode()
"""


@pytest.mark.parametrize(
    "path", [".data/a.bin", "conf.toml", "kernels/a.h", "vendor/site-packages/a"]
)
def test_native_reads_anywhere_in_the_project(derive: Deriver, root: Path, path: str) -> None:
    write(root / path, "one")
    found = derive(f"{NATIVE}\ndef build(target): return read({path!r})")
    assert why(found, root) == ""
    write(root / path, "two")
    assert why(found, root) == f"`{path}` changed"


def test_native_reads_by_a_link(derive: Deriver, root: Path) -> None:
    for name in ("a/x.bin", "b/x.bin"):
        write(root / "data" / name, name)
    link = root / "data/current"
    link.symlink_to("a")
    found = derive(f"{NATIVE}\ndef build(target): return read('data/current/x.bin')")
    assert why(found, root) == ""
    link.unlink()
    link.symlink_to("b")
    assert why(found, root) == "`data/current` points elsewhere now"


def test_what_changes_after_native_code_has_read_it(
    derive: Deriver, root: Path, tmp_path: Path
) -> None:
    path, ready = write(root / "w.bin", "one"), tmp_path / "ready"

    def change() -> None:
        while not ready.exists():
            time.sleep(0.01)
        path.write_text("two")

    thread = threading.Thread(target=change)
    thread.start()
    found = derive(
        f"{NATIVE}\n"
        "def build(target):\n"
        "    text = read('w.bin')\n"
        f"    libc.creat({os.fsencode(ready)!r}, 0o600)\n"
        "    while read('w.bin') == text: pass\n"
        "    return text\n"
    )
    thread.join()
    assert why(found, root) == "`w.bin` changed while it was derived"


def test_a_database_that_is_written_beside_its_file(derive: Deriver, root: Path) -> None:
    path = root / "x.db"
    root.mkdir()
    with sqlite3.connect(path) as base:
        base.execute("pragma journal_mode=wal")
        base.execute("create table t(a)")
    base.close()
    unit = """
        import sqlite3
        def build(target):
            base = sqlite3.connect("x.db")
            return str(base.execute("select count(*) from t").fetchone())
        """
    found = derive(unit)
    assert why(found, root) == ""
    with sqlite3.connect(path) as base:
        base.execute("pragma wal_autocheckpoint=0")
        base.execute("insert into t values (2)")
        base.commit()
        assert why(found, root) == "`x.db-wal` was added"
        assert "loads `x.db-wal`" in why(derive(unit), root)
    base.close()


# --- where the project lies


@pytest.mark.parametrize("call", ["os.getcwd()", "os.path.basename(os.getcwd())"])
def test_a_project_that_shows_where_it_lies(derive: Deriver, root: Path, call: str) -> None:
    found = derive(f"import os\ndef build(target): return {call}")
    assert why(found, root) == ""
    moved = root.rename(root.with_name("moved"))
    assert "lies in another directory" in why(found, moved)


def test_a_project_that_is_called_as_its_package(derive: Deriver, root: Path) -> None:
    root = root.rename(root.with_name("toy")) if root.exists() else root.with_name("toy")
    found = toy.derive(toy.write_project(root, unit="def build(target): return 'toy'"))
    moved = root.rename(root.with_name("toy-1.0"))  # as an sdist is unpacked
    assert why(found, moved) == ""


def test_workers_of_a_build_that_ignores_pythons_variables() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE)!r})\n"
        "from max_build.workers import environment\n"
        "print(sorted(environment({'PYTHONPATH': 'x', 'PYTHONHOME': 'x', 'HOME': 'x'})))\n"
    )
    hidden = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True)
    assert b"PYTHONPATH" not in hidden.stdout
    assert b"PYTHONHOME" not in hidden.stdout
    assert b"HOME" in hidden.stdout
    assert b"PYTHONHASHSEED" in hidden.stdout
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert b"PYTHONPATH" in shown.stdout
