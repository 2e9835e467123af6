"""In a process of its own: an adapter at work, and what it did to the process.

`python -m max_build.testing.probe ANSWERS` reads one `Request` from its standard input and writes
its answers into that file, whatever the compiler prints. It leaves by `os._exit`, as a worker does.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from max_build import compilers
from max_build.compilers import Derivation, Job, Memory, Product
from max_build.config import load_settings
from max_build.errors import MaxBuildError
from max_build.key import Components, digest
from max_build.record import Kernel, Tensor
from max_build.target import Target

__all__ = ["Answer", "Request", "Task", "main", "write"]

T = TypeVar("T")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One job: a project, a target, and how far to go.

    Parameters
    ----------
    root, scratch
        The project's directory, and one for the artifact.
    before, between
        Files of the project to write before `derive`, and between it and `compile`.
    """

    root: str
    target: str
    scratch: str
    compiles: bool = False
    before: dict[str, str] = {}
    between: dict[str, str] = {}


class Request(msgspec.Struct, frozen=True):
    """Jobs for one process, the modules to look for in it, and whether it has a memory."""

    compiler: str
    tasks: tuple[Task, ...]
    heavy: tuple[str, ...]
    remembers: bool


class Answer(msgspec.Struct):
    """What came of one job.

    Parameters
    ----------
    loaded
        The heavy modules that were there when the settings had been read, and after `derive`.
    ambient
        What a `Direct` adapter said, without the compiler.
    error
        The type and the text of what was raised.
    touched
        What of the process `derive` or `compile` left otherwise than they found it.
    """

    loaded: tuple[list[str], list[str]] = ([], [])
    ambient: dict[str, str] | None = None
    components: Components | None = None
    ir: bytes | None = None
    uncacheable: str = ""
    files: dict[str, tuple[str, ...]] = {}
    digests: dict[str, tuple[str, ...]] = {}
    kernels: dict[str, Kernel] = {}
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()
    error: tuple[str, str] | None = None
    touched: list[str] = []


def main(answers: str) -> None:
    """Do what the request says, in this process, and leave it."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    memory = _Dictionary() if request.remembers else None
    found = [_answer(request, task, memory) for task in request.tasks]
    Path(answers).write_bytes(msgspec.json.encode(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def write(root: Path, files: dict[str, str]) -> None:
    """Write files of a project."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


class _Dictionary:
    """A `Memory` as long as the process."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], bytes] = {}

    def get(self, namespace: str, key: str) -> bytes | None:
        return self._values.get((namespace, key))

    def under(self, namespace: str, prefix: str) -> dict[str, bytes]:
        return {
            key: value
            for (space, key), value in self._values.items()
            if space == namespace and key.startswith(prefix)
        }

    def set(self, namespace: str, key: str, value: bytes) -> None:
        self._values[namespace, key] = value


def _answer(request: Request, task: Task, memory: Memory | None) -> Answer:
    answer = Answer(touched=[])
    try:
        write(Path(task.root), task.before)
        _work(request, task, memory, answer)
    except MaxBuildError as error:
        answer.error = type(error).__name__, str(error)
    except Exception as error:  # noqa: BLE001 - told to whoever reads the test's report
        answer.error = type(error).__name__, traceback.format_exc()
    return answer


def _work(request: Request, task: Task, memory: Memory | None, answer: Answer) -> None:
    adapter = compilers.get(request.compiler)
    settings = load_settings(Path(task.root), environ={})
    if isinstance(adapter, compilers.Direct):
        answer.ambient = dict(adapter.ambient(os.environ))
    light = _loaded(request.heavy)
    answer.loaded = light, light
    job = Job(
        settings.units[0],
        Target(task.target),
        Path(settings.root),
        settings.python_path,
        Path(task.scratch),
        memory,
    )
    derivation: Derivation = _watched(answer, "derive", lambda: adapter.derive(job))
    answer.loaded = light, _loaded(request.heavy)
    answer.components = derivation.components
    answer.ir = derivation.ir
    answer.uncacheable = derivation.uncacheable
    write(Path(task.root), task.between)
    if not task.compiles:
        return
    product: Product = _watched(answer, "compile", lambda: adapter.compile(job, derivation))
    answer.uncacheable = answer.uncacheable or product.uncacheable
    answer.files = {
        str(role): (str(found),) if isinstance(found, Path) else tuple(map(str, found))
        for role, found in product.files.items()
    }
    answer.kernels = dict(product.kernels)
    answer.inputs, answer.outputs, answer.weights = product.inputs, product.outputs, product.weights
    answer.digests = {
        role: tuple(digest(Path(name).read_bytes()) for name in names if os.path.isfile(name))
        for role, names in answer.files.items()
    }


def _watched(answer: Answer, what: str, call: Callable[[], T]) -> T:
    before = _state()
    try:
        return call()
    finally:
        after = _state()
        answer.touched += [f"{what}: {name}" for name in before if before[name] != after[name]]


def _state() -> dict[str, object]:
    umask = os.umask(0o077)
    os.umask(umask)
    return {
        "the working directory": os.getcwd(),
        "os.environ": dict(os.environ),
        "the umask": umask,
        "sys.path": tuple(sys.path),
    }


def _loaded(heavy: tuple[str, ...]) -> list[str]:
    return [name for name in heavy if name in sys.modules]


if __name__ == "__main__":
    main(sys.argv[1])
