"""A compiler for tests, installed as a distribution of its own: text in, the same text out.

A unit's `entry` is called with the target and returns text, which is the IR and the artifact.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import importlib
import os
import sys
import tempfile
import textwrap
import warnings
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import MetadataPathFinder
from pathlib import Path

import msgspec
import pytest

from max_build import compilers, distributions
from max_build.compilers import Job
from max_build.config import load_settings
from max_build.key import Components
from max_build.recipes.recipe import Recipe
from max_build.recipes.recorder import Recorder
from max_build.target import Target
from max_build.workers import environment

ADAPTER = """
import os
from max_build import distributions
from max_build.compilers import Derivation, Product
from max_build.compilers.entry import imported
from max_build.errors import CompileError
from max_build.key import Components, digest
from max_build.target import KNOWN_TARGETS


class ToyCompiler:
    name = "toy"
    accepts = KNOWN_TARGETS
    runs_user_code = True
    one_job_per_process = False
    distributions = ("toy-compiler",)

    def problems(self, unit):
        return ()

    def ambient(self, environ):
        return {name: environ[name] for name in environ if name.startswith("TOY_")}

    def derive(self, job):
        with imported(job) as entry:
            try:
                text = entry(job.target)
            except Exception as error:
                raise CompileError(f"{type(error).__name__}: {error}") from error
        ir = text.encode()
        components = Components(
            compiler=distributions.identities(self.distributions),
            target=str(job.target),
            options={k: str(v) for k, v in job.unit.declared["options"].items()},
            sources={"ir": digest(ir)},
            environment=self.ambient(os.environ),
        )
        return Derivation(components, ir, state=ir)

    def compile(self, job, derivation):
        path = job.scratch / "out.ptx"
        noise = os.urandom(4).hex().encode() if b"noisy" in derivation.state else b""
        path.write_bytes(derivation.state + noise)
        return Product(files={"ptx": path})
"""

PYPROJECT = """
[project]
name = "toy"

[tool.max-build]
targets = ["cpu"]

[tool.max-build.graphs.unit]
entry = "toy.unit:build"
compiler = "toy"
"""


def write_distribution(
    site: Path, name: str, version: str, files: dict[str, str], entry_points: str = ""
) -> None:
    """Install a distribution into a directory, RECORD and all."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    for old in site.glob(f"{name.replace('-', '_')}-*.dist-info/*"):
        old.unlink()
    for old in site.glob(f"{name.replace('-', '_')}-*.dist-info"):
        old.rmdir()
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        **({f"{info}/entry_points.txt": entry_points} if entry_points else {}),
    }
    rows = []
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rows.append(f"{path},sha256={digest.rstrip('=')},{len(text)}")
    (site / info / "RECORD").write_text("\n".join([*rows, f"{info}/RECORD,,"]) + "\n")


def write_compiler(site: Path, version: str = "1.0", extra: str = "") -> Path:
    """Install the toy compiler."""
    write_distribution(
        site,
        "toy-compiler",
        version,
        {"toy_compiler.py": ADAPTER + extra},
        "[max_build.compilers]\ntoy = toy_compiler:ToyCompiler\n",
    )
    return site


def install(site: Path, monkeypatch: pytest.MonkeyPatch, version: str = "1.0") -> Path:
    """Install the toy compiler for this process and those it starts."""
    write_compiler(site, version)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    forget()
    return site


def forget() -> None:
    """Look at what is installed again."""
    sys.modules.pop("toy_compiler", None)
    compilers.get.cache_clear()
    distributions.identity.cache_clear()
    importlib.invalidate_caches()


def write_project(root: Path, **modules: str) -> Path:
    """Write a repo with one unit; `modules` are files of its package, by name without suffix."""
    package = root / "src" / "toy"
    package.mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").touch()
    for name, text in modules.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    return root


@dataclass(frozen=True)
class Derived:
    """What a worker would answer: the components, and the recipe or why there is none."""

    components: Components
    recipe: Recipe | None
    always: str


class _Answer(msgspec.Struct):
    components: Components | None
    recipe: Recipe | None
    always: str


def _own_metadata() -> None:
    """Give Python its finder of distributions back; Dask's backport of it has taken its place."""
    backport = "importlib_metadata"
    sys.meta_path[:] = [one for one in sys.meta_path if backport not in type(one).__module__]
    PathFinder.find_distributions = MetadataPathFinder.find_distributions


def derive(root: Path, target: str = "cpu") -> Derived:
    """Derive the repo's first unit as a worker does, in a fork of this process: it costs 30 ms.

    The tracer cannot be taken out of a process again, so it never enters this one.
    """
    settings = load_settings(root)
    receiver, sender = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            gc.callbacks.clear()  # hypothesis times them
            warnings.simplefilter("ignore")  # a unit's are not ours
            _own_metadata()
            canonical = environment(os.environ)
            os.environ.clear()
            os.environ.update(canonical)
            os.chdir(root)
            with tempfile.TemporaryDirectory() as scratch:
                job = Job(
                    settings.units[0], Target(target), root, settings.python_path, Path(scratch)
                )
                derivation, recipe, always = Recorder().derive(job)
            answer = _Answer(derivation.components, recipe, always)
        except BaseException as error:  # noqa: BLE001 - told on the other side
            answer = _Answer(None, None, repr(error))
        os.write(sender, msgspec.json.encode(answer))
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        answer = msgspec.json.decode(pipe.read(), type=_Answer)
    os.waitpid(pid, 0)
    assert answer.components is not None, answer.always
    return Derived(answer.components, answer.recipe, answer.always)
