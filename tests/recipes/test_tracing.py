"""What a worker notes while a unit is derived, and what makes a unit derive always."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import toy_repo as toy
from max_build.config import load_settings
from max_build.key import Components, digest
from max_build.messages import Derive, Derived
from max_build.recipes.recipe import Recipe, broken, encode
from max_build.recipes.surroundings import Here
from max_build.workers import Worker

Deriver = Callable[..., toy.Derived]
EMPTY = Recipe(key="", components=Components(compiler={}, target="cpu", sources={}), python="")


@pytest.fixture
def derive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deriver:
    """`derive(unit="def build(target): …", **modules)`: what the recorder answers in a fork."""
    toy.install(tmp_path / "site", monkeypatch)

    def derived(unit: str, **modules: str) -> toy.Derived:
        return toy.derive(toy.write_project(tmp_path / "repo", unit=unit, **modules))

    return derived


def recipe(derived: toy.Derived) -> Recipe:
    assert derived.always == ""
    assert derived.recipe is not None
    return derived.recipe


def holds(found: toy.Derived, root: Path) -> str:
    """Why a recipe does not hold now; empty if it does."""

    def digest_of(path: str) -> str:
        return digest(Path(path).read_bytes())

    here = Here(str(root), (str(root / "src"), str(root)), os.environ, digest_of, {})
    return broken(recipe(found), here)


def test_files_modules_and_the_compiler(derive: Deriver) -> None:
    found = recipe(
        derive(
            "from toy import part\ndef build(target): return part.TEXT",
            part="TEXT = 'one'",
        )
    )
    assert set(found.files) == {"src/toy/__init__.py", "src/toy/part.py", "src/toy/unit.py"}
    assert found.modules["src"]["toy"] == ("toy",)
    assert found.modules["src/toy"]["part"] == ("part.py",)
    assert found.modules["src/toy"]["__init__"] == ("__init__.py",)
    assert found.distributions["toy-compiler"].identity.startswith("1.0+")


def test_a_recipe_names_no_place_user_or_host(derive: Deriver, tmp_path: Path) -> None:
    package = tmp_path / "repo/src/toy"
    package.mkdir(parents=True)
    (package / "data.json").write_text("{}")
    found = derive(
        """
        import os, pathlib
        def build(target):
            here = pathlib.Path(__file__).resolve().parent
            return (here / "data.json").read_text() + os.environ.get("HOME", "")[:0]
        """
    )
    text = encode(recipe(found)).decode()
    for word in (str(tmp_path), os.path.expanduser("~"), os.uname().nodename):
        assert word not in text


def test_a_file_that_is_read_looked_for_listed(derive: Deriver, tmp_path: Path) -> None:
    (tmp_path / "repo/parts").mkdir(parents=True)
    (tmp_path / "repo/parts/a.txt").write_text("a")
    found = recipe(
        derive(
            """
            import glob, os, pathlib
            def build(target):
                names = sorted(glob.glob("parts/*.txt"))
                there = os.path.exists("switch"), pathlib.Path("parts").is_dir()
                try:
                    open("absent.txt")
                except FileNotFoundError:
                    pass
                return "".join(open(name).read() for name in names) + str(there)
            """
        )
    )
    assert "parts/a.txt" in found.files
    assert set(found.listings) == {"parts"}
    assert found.looked["switch"] == found.looked["absent.txt"] == "absent"
    assert found.looked["parts"] == "directory"


def test_variables_that_are_read_set_and_unset(
    derive: Deriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "4")
    monkeypatch.delenv("DEPTH", raising=False)
    found = recipe(
        derive(
            """
            import os
            def build(target):
                os.environ["OWN"] = "1"
                return os.environ["WIDTH"] + os.getenv("DEPTH", "2") + os.environ["OWN"]
            """
        )
    )
    assert found.variables["DEPTH"] == ""
    assert found.variables["WIDTH"] not in ("", "4")
    assert "OWN" not in found.variables


def test_a_module_that_is_nowhere(derive: Deriver) -> None:
    found = recipe(
        derive(
            """
            try:
                import not_to_be_found
            except ImportError:
                not_to_be_found = None
            def build(target): return str(not_to_be_found)
            """
        )
    )
    assert found.lacking == ("not_to_be_found",)
    assert found.modules["src"]["not_to_be_found"] == ()
    assert found.modules["."]["not_to_be_found"] == ()


def test_a_distribution_that_the_project_imports(derive: Deriver, tmp_path: Path) -> None:
    site = tmp_path / "site"
    toy.write_distribution(site, "inner-lib", "3.0", {"inner_lib.py": "N = 3"})
    toy.write_distribution(
        site, "outer-lib", "2.0", {"outer_lib.py": "from inner_lib import N\nimport os\n"}
    )
    found = recipe(derive("import outer_lib\ndef build(target): return str(outer_lib.N)"))
    assert set(found.distributions) == {"toy-compiler", "outer-lib", "inner-lib"}
    assert found.imported == ("inner_lib", "outer_lib")


def test_an_environment_inside_the_project_and_a_project_among_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "site-packages" / "my-packages" / "repo"
    site = toy.install(root / ".venv" / "lib" / "site-packages", monkeypatch)
    toy.write_distribution(site, "outer-lib", "2.0", {"outer_lib.py": "N = 1"})
    toy.write_project(root, unit="import outer_lib\ndef build(target): return str(outer_lib.N)")
    found = recipe(toy.derive(root))
    assert set(found.files) == {"src/toy/__init__.py", "src/toy/unit.py"}
    assert "outer-lib" in found.distributions


def test_an_extension_module_of_the_project(derive: Deriver, tmp_path: Path) -> None:
    from xxhash import _xxhash

    library = Path(_xxhash.__file__)
    package = tmp_path / "repo/src/toy"
    package.mkdir(parents=True)
    shutil.copy(library, package)
    found = recipe(
        derive("from toy import _xxhash\ndef build(target): return _xxhash.xxh32_hexdigest(b'')")
    )
    assert found.files[f"src/toy/{library.name}"] == digest(library.read_bytes())
    assert found.modules["src/toy"]["_xxhash"] == (library.name,)


def test_files_that_native_code_reads(derive: Deriver, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "repo").mkdir()
    save_file({"w": np.zeros((2, 3), np.float32)}, tmp_path / "repo/w.safetensors")
    found = derive(
        """
        from safetensors import safe_open
        def build(target):
            with safe_open("w.safetensors", "np") as file:
                return str(file.get_slice("w").get_shape())
        """
    )
    assert "w.safetensors" in recipe(found).files


@pytest.mark.parametrize(
    "body",
    [
        "from pathlib import Path; return Path('cfg/current.json').resolve().read_text()",
        "import os; return open('cfg/' + os.readlink('cfg/current.json')).read()",
        "import os; return str(os.path.islink('cfg/current.json'))",
        "import os; return str(os.path.samefile('cfg/current.json', 'cfg/small.json'))",
        "import os; return str(next(e.name for e in os.scandir('cfg') if e.is_symlink()))",
        "return open('cfg/hop/../wide.txt').read()",
    ],
)
def test_where_a_link_points(derive: Deriver, tmp_path: Path, body: str) -> None:
    root = tmp_path / "repo"
    for name in ("cfg/a/in", "cfg/b/in"):
        (root / name).mkdir(parents=True)
        (root / name).with_name("wide.txt").write_text(name)
    (root / "cfg/small.json").write_text("1")
    (root / "cfg/large.json").write_text("2")
    (root / "cfg/current.json").symlink_to("small.json")
    (root / "cfg/ab").symlink_to("a")
    (root / "cfg/hop").symlink_to("ab/in")
    found = derive(f"def build(target):\n    {body}\n")
    assert holds(found, root) == ""
    if "hop" in body:
        (root / "cfg/ab").unlink()
        (root / "cfg/ab").symlink_to("b")
        assert holds(found, root) == "`cfg/ab` points elsewhere now"
        return
    (root / "cfg/current.json").unlink()
    (root / "cfg/current.json").symlink_to("large.json")
    assert holds(found, root) == "`cfg/current.json` points elsewhere now"
    (root / "cfg/current.json").unlink()
    (root / "cfg/current.json").write_text("1")
    assert holds(found, root) != ""


@pytest.mark.parametrize(
    "body",
    [
        "import os; return str(os.path.getsize('data/vocab.bin'))",
        "import os; return str(os.lstat('data/vocab.bin').st_size)",
        "from pathlib import Path; return str(Path('data/vocab.bin').stat().st_size)",
        "import os; return str([one.stat().st_size for one in os.scandir('data')])",
    ],
)
def test_the_size_of_a_file_that_is_not_read(derive: Deriver, tmp_path: Path, body: str) -> None:
    data = tmp_path / "repo/data/vocab.bin"
    data.parent.mkdir(parents=True)
    data.write_bytes(b"1234")
    found = derive(f"def build(target):\n    {body}\n")
    data.write_bytes(b"5678")
    assert holds(found, tmp_path / "repo") == ""
    data.write_bytes(b"12345")
    assert holds(found, tmp_path / "repo") == "`data/vocab.bin` changed in size"


def test_a_file_that_is_only_looked_for_may_grow(derive: Deriver, tmp_path: Path) -> None:
    data = tmp_path / "repo/data/log.txt"
    data.parent.mkdir(parents=True)
    data.write_text("1")
    found = derive(
        """
        import glob, os
        from pathlib import Path
        def build(target):
            path = Path("data/log.txt")
            there = path.exists(), path.is_file(), path.resolve().name, os.path.isfile(path)
            return str((there, glob.glob("data/*"), os.listdir("data"), list(os.walk("data"))))
        """
    )
    data.write_text("12")
    assert holds(found, tmp_path / "repo") == ""


@pytest.mark.parametrize(
    "body",
    [
        "from safetensors import safe_open\n    return str(safe_open({path!r}, 'np').keys())",
        "from safetensors.numpy import load_file\n    return str(sorted(load_file({path!r})))",
        "import safetensors as s\n    return str(s.safe_open(filename={path!r}, framework='np'))",
    ],
)
def test_weights_outside_the_project(derive: Deriver, tmp_path: Path, body: str) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    path = tmp_path / "w.safetensors"
    save_file({"w": np.zeros((2, 3), np.float32)}, path)
    found = derive(f"def build(target):\n    {body.format(path=str(path))}\n")
    assert found.recipe is None
    assert f"reads `{path}`, which belongs neither to the project" in found.always


def test_weights_outside_the_project_in_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library is imported only after the tracing has begun."""
    import numpy as np
    from safetensors.numpy import save_file

    path = tmp_path / "w.safetensors"
    save_file({"w": np.zeros((2, 3), np.float32)}, path)
    toy.install(tmp_path / "site", monkeypatch)
    (tmp_path / "scratch").mkdir()
    unit = f"""
        from safetensors import safe_open
        def build(target):
            with safe_open({str(path)!r}, "np") as file:
                return str(isinstance(file, safe_open)) + str(file.keys())
        """
    settings = load_settings(toy.write_project(tmp_path / "repo", unit=unit))
    worker = Worker(settings.root)
    try:
        job = Derive(
            settings.units[0], "cpu", settings.root, settings.python_path, str(tmp_path / "scratch")
        )
        answer = worker.ask(job, Derived, timeout=60)
    finally:
        worker.close()
    assert answer.components.sources["ir"] == digest(b"True['w']")
    assert f"reads `{path}`, which belongs neither to the project" in answer.always


def test_a_tokenizer_outside_the_project(derive: Deriver, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    found = derive(
        f"""
        from tokenizers import Tokenizer, models
        Tokenizer(models.BPE()).save({str(path)!r})
        def build(target):
            return str(Tokenizer.from_file({str(path)!r}).get_vocab_size())
        """
    )
    assert found.recipe is None
    assert f"reads `{path}`, which belongs neither to the project" in found.always


def test_what_unknown_native_code_maps(derive: Deriver, tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(bytes(4096))
    found = derive(
        f"""
        import ctypes
        def build(target):
            libc = ctypes.CDLL(None)
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3,
                                  ctypes.c_long]
            place = libc.mmap(None, 4096, 1, 2, libc.open({str(path).encode()!r}, 0), 0)
            return ctypes.string_at(place, 4).hex()
        """
    )
    assert found.recipe is None
    assert f"`{path}` was mapped into memory" in found.always


def test_a_large_file_is_read_in_parts(derive: Deriver, tmp_path: Path) -> None:
    import resource

    size = 256 << 20
    data = tmp_path / "repo/w.bin"
    data.parent.mkdir()
    with data.open("wb") as file:
        file.truncate(size)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    found = derive("def build(target): return open('w.bin', 'rb').read(4).hex()")
    assert set(recipe(found).files) >= {"w.bin"}
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert after < max(before, mine) + (size >> 11)  # KiB: half of it


def test_a_file_that_has_settled_is_hashed_once(tmp_path: Path) -> None:
    code = (
        "import os, re\n"
        "from max_build.recipes.tracing import Tracer\n"
        "tracer = Tracer(())\n"
        "def taken():\n"
        "    return int(re.search(r'rchar: (\\d+)', open('/proc/self/io').read())[1])\n"
        "start = taken()\n"
        "one = tracer.content(os.__file__)\n"
        "size = os.path.getsize(os.__file__)\n"
        "assert taken() - start >= size\n"
        "start = taken()\n"
        "assert tracer.content(os.__file__) == one\n"
        "assert taken() - start < size\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_a_recipe_with_a_path_that_cannot_be_is_no_fault(tmp_path: Path) -> None:
    for path in ("a\0b", "\ud800"):
        here = Here(str(tmp_path), (), {}, lambda one: str(os.stat(one)), {})
        for fields in (
            {"files": {path: "0"}},
            {"listings": {path: "0"}},
            {"modules": {path: {"m": ("m.py",)}}},
            {"looked": {path: "file"}},
            {"links": {path: "0"}},
            {"sizes": {path: 1}},
            {"imported": (path,), "lacking": (path,), "files": {"gone": "0"}},
        ):
            one = msgspec.structs.replace(EMPTY, python=here.python, **fields)
            assert broken(one, here) != ""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import time; return str(time.time())", "reads the clock"),
        ("import time; return time.strftime('%Y')", "reads the clock"),
        ("import datetime; return str(datetime.datetime.now())", "reads the clock"),
        ("import datetime; return str(datetime.date.today())", "reads the clock"),
        ("import os; return os.urandom(4).hex()", "draws random bytes"),
        ("import uuid; return str(uuid.uuid4())", "draws random bytes"),
        ("import secrets; return secrets.token_hex(4)", "draws random bytes"),
        ("import random; return str(random.Random().random())", "without a seed"),
        ("import random; random.seed(); return str(random.random())", "without a seed"),
        ("import numpy as np; return str(np.random.default_rng().random())", "random bytes"),
        ("import subprocess; return subprocess.check_output(['true'], text=True)", "a program"),
        ("import os; os.system('true'); return ''", "starts a program"),
        ("import os; return str(os.cpu_count())", "asks for `os.cpu_count`"),
        ("import socket; return socket.gethostname()", "uses the network"),
        ("return open('/etc/hostname').read()", "belongs neither to the project"),
        ("import os; return str(os.path.exists('/opt/switch'))", "looks at `/opt/switch`"),
        ("import os; return str(sorted(os.environ))", "reads the whole environment"),
        ("open('made.txt', 'w').write('x'); return ''", "changes `made.txt`"),
        ("import os; os.mkdir('made'); return ''", "changes `made`"),
        ("import os; return str(os.listdir(os.open('src', os.O_RDONLY)))", "descriptor"),
        ("import ctypes; ctypes.CDLL('libm.so.6'); return ''", "loads `libm.so.6`"),
    ],
)
def test_what_no_recipe_can_promise(derive: Deriver, body: str, why: str) -> None:
    found = derive(f"def build(target):\n    {body}\n")
    assert found.recipe is None
    assert why in found.always
    assert "src/toy/unit.py" in found.always


@pytest.mark.parametrize(
    "body",
    [
        "import random; return str(random.random())",
        "import numpy as np; return str(np.random.rand())",
        "import random; return str(random.Random(7).random())",
        "import tempfile\n    with tempfile.TemporaryFile() as f: return str(f.write(b'x'))",
        (
            "import os, tempfile\n"
            "    with tempfile.TemporaryDirectory() as d:\n"
            "        os.mkdir(d + '/a'); open(d + '/a/b', 'w').close()\n"
            "        return open(d + '/a/b').read()"
        ),
        "import logging; logging.getLogger('x').warning('told'); return ''",
        "import time; return str(time.gmtime(0).tm_year)",
        "import platform; return platform.machine()",
        "from importlib.metadata import version; return version('toy-compiler')",
        "from pathlib import Path; return str(Path('src').resolve().is_dir())",
    ],
)
def test_what_harms_no_recipe(derive: Deriver, body: str) -> None:
    unit = f"def build(target):\n    {body}\n"
    first, second = derive(unit), derive(unit)
    recipe(first)
    assert first.components == second.components


def test_a_file_that_changes_while_it_is_used(derive: Deriver, tmp_path: Path) -> None:
    data = tmp_path / "repo" / "data.txt"
    data.parent.mkdir()
    data.write_text("one")
    timer = threading.Timer(0.5, data.write_text, ("two",))
    timer.start()
    found = derive(
        """
        import time
        def build(target):
            while open("data.txt").read() != "two":
                time.sleep(0.01)
            return ""
        """
    )
    timer.join()
    assert found.always == "`data.txt` changed while it was derived"


def test_bytecode_beside_a_module_is_not_believed(derive: Deriver, tmp_path: Path) -> None:
    unit = "def build(target): return 'one'"
    path = tmp_path / "repo/src/toy/unit.py"
    derive(unit)
    py_compile.compile(str(path))
    before = path.stat()
    path.write_text(unit.replace("one", "two"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = toy.derive(tmp_path / "repo")
    assert found.components.sources["ir"] == digest(b"two")


def test_a_worker_that_is_used_again_forgets_no_dependency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.install(tmp_path / "site", monkeypatch)
    root = toy.write_project(
        tmp_path / "repo",
        unit="from toy import part\ndef build(target): return part.TEXT",
        part="TEXT = 'one'",
    )
    settings = load_settings(root)
    worker = Worker(root)
    try:
        for _ in range(2):
            with tempfile.TemporaryDirectory() as scratch:
                answer = worker.ask(
                    Derive(settings.units[0], "cpu", settings.root, settings.python_path, scratch),
                    Derived,
                    timeout=60,
                )
            assert answer.recipe is not None
            assert "src/toy/part.py" in answer.recipe.files
    finally:
        worker.close()
