"""Behind the contract of compilers: projects in folders of their own, and processes to try them in.

Two machines are told apart by what differs between them: where a project lies, who is at home
there, and, for an adapter that works in the build process, what that process was started with.
"""

from __future__ import annotations

import functools
import json
import os
import site
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from max_build import compilers
from max_build.config import Settings, load_settings
from max_build.testing.probe import Answer, Request, Task, write
from max_build.workers import environment

if TYPE_CHECKING:
    from max_build.compilers import Compiler
    from max_build.testing.compiler import CompilerContract

__all__ = ["UNIT", "Machine", "Trials", "Tried"]

UNIT = "unit"
"""The name of the unit in every project of the contract."""

_HEAVY = ("cuda", "max", "numpy", "torch", "triton")
_USER = "max-build-contract-user"
_TIMEOUT = 1800.0  # seconds


class Machine:
    """A home, a place for temporary files, and projects.

    Parameters
    ----------
    folder
        All of it, absolute.
    other
        Whether a process is started with other things too, and has no `Memory`.
    """

    def __init__(self, contract: type[CompilerContract], folder: Path, *, other: bool) -> None:
        self._contract = contract
        self._other = other
        self._count = 0
        self.folder = folder
        self.temporary, self.home, self.started = (
            folder / name for name in ("temporary", "home", "started")
        )

    def project(
        self,
        edit: Mapping[str, str] | None = None,
        table: Mapping[str, Any] | None = None,
    ) -> Path:
        """A new project: the contract's, with files edited and keys of the unit's table set."""
        self._count += 1
        root = self.folder / "projects" / str(self._count)
        contract = self._contract
        keys = {"compiler": contract.compiler, **contract.unit, **(table or {})}
        lines = [
            '[project]\nname = "contract"\nversion = "1"\n[tool.max-build]',
            f"targets = {_toml([contract.targets[0]])}",
            f"[tool.max-build.{contract.kind}s.{UNIT}]",
            *(f"{_toml(name)} = {_toml(value)}" for name, value in keys.items()),
        ]
        write(root, {"pyproject.toml": "\n".join(lines) + "\n", **contract.files, **(edit or {})})
        return root

    def task(
        self,
        edit: Mapping[str, str] | None = None,
        table: Mapping[str, Any] | None = None,
        *,
        root: Path | None = None,
        target: str = "",
        **more: Any,
    ) -> Task:
        """A job in a new project, or in the one at `root`; `more` as in `Task`."""
        root = root or self.project(edit, table)
        self._count += 1
        scratch = self.folder / "scratch" / str(self._count)
        scratch.mkdir(parents=True)
        target = target or self._contract.targets[0]
        return Task(root=str(root), target=target, scratch=str(scratch), **more)

    def run(self, *tasks: Task) -> list[Answer]:
        """Do these jobs in one process, or in one each where the adapter asks for that."""
        if not tasks:
            return []
        if compilers.get(self._contract.compiler).one_job_per_process:
            return [self.process(task)[0] for task in tasks]
        return self.process(*tasks)

    def process(self, *tasks: Task) -> list[Answer]:
        """Do these jobs in one process.

        Raises
        ------
        AssertionError
            If the process dies, with its last words, or its answer is not of the types that the
            protocol names.
        """
        contract = self._contract
        heavy = tuple(dict.fromkeys((*contract.heavy, *_HEAVY)))
        self._count += 1
        answers = self.folder / f"answers{self._count}"
        for one in (self.temporary, self.home, self.started):
            one.mkdir(parents=True, exist_ok=True)
        request = Request(contract.compiler, tasks, heavy, remembers=not self._other)
        own, folder, umask = self._surroundings(Path(tasks[0].root))
        done = subprocess.run(
            [sys.executable, "-m", "max_build.testing.probe", str(answers)],
            input=msgspec.json.encode(request),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=own,
            umask=umask,
            timeout=_TIMEOUT,
            check=False,
        )
        said = done.stdout.decode(errors="replace")[-4000:]
        assert done.returncode == 0, f"the process left with status {done.returncode}\n{said}"
        try:
            return msgspec.json.decode(answers.read_bytes(), type=list[Answer])
        except msgspec.ValidationError as error:
            message = f"a worker could not tell what the adapter found: {error}"
            raise AssertionError(message) from error

    def _surroundings(self, root: Path) -> tuple[dict[str, str], Path, int]:
        """Environment, working directory and umask of a process.

        An adapter that runs the project's code does so in a worker, where they are always the same.
        """
        own = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MAX_BUILD_", "XDG_"))},
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "LOGNAME": f"{_USER}-{self.folder.name}",
            "USER": f"{_USER}-{self.folder.name}",
            # Bytecode of the project would show; that of an environment must not be for us alone.
            "PYTHONDONTWRITEBYTECODE": "1" if self._other else "",
            "PYTHONHASHSEED": "77" if self._other else "1",
            "PYTHONSAFEPATH": "1",
            "PYTHONUSERBASE": site.getuserbase(),  # it lies below the real home
            "TZ": "Asia/Tokyo" if self._other else "America/Lima",
        }
        if compilers.get(self._contract.compiler).runs_user_code:
            return environment(own), root, 0o022
        return own, self.started, 0o077 if self._other else 0o022

    def names(self) -> tuple[str, ...]:
        """What no key may hold of this machine."""
        return str(self.folder), _USER


@dataclass(frozen=True, slots=True)
class Tried:
    """One compile, and what else it left.

    Parameters
    ----------
    wrote
        Files and directories of the project that are not as they were.
    left
        What lies among the temporary files.
    """

    answer: Answer
    scratch: Path
    wrote: list[str]
    left: list[str]


class Trials:
    """Two machines, and what is tried on them for more than one test.

    Parameters
    ----------
    contract
        The class with the attributes.
    folder
        An empty directory.
    """

    def __init__(self, contract: type[CompilerContract], folder: Path) -> None:
        folder = folder.resolve()  # as a build resolves the project's
        self.contract = contract
        self.folder = folder
        self.here = Machine(contract, folder / "here", other=False)
        self.elsewhere = Machine(contract, folder / "else" / "where", other=True)

    @property
    def adapter(self) -> Compiler:
        """The adapter, as a build finds it."""
        return compilers.get(self.contract.compiler)

    @functools.cached_property
    def compiled(self) -> Tried:
        """The unit as it stands, compiled here."""
        return self._tried(self.here)

    @functools.cached_property
    def compiled_elsewhere(self) -> Tried:
        """The same on the other machine."""
        return self._tried(self.elsewhere)

    @functools.cached_property
    def per_target(self) -> dict[str, Answer]:
        """The unit as it stands, compiled here for each target."""
        first, *rest = self.contract.targets
        tasks = [self.here.task(target=one, compiles=True) for one in rest]
        answers = self.here.run(*tasks)
        return {first: self.compiled.answer, **dict(zip(rest, answers, strict=True))}

    @functools.cached_property
    def broken(self) -> Tried:
        """The unit with a source that does not compile."""
        return self._tried(self.here, self.contract.broken)

    def settings(self, root: Path) -> Settings:
        """The settings of a project, with a cache for it alone."""
        flags = {"cache": {"dir": str(self.folder / "cache")}}
        return load_settings(root, environ={}, flags=flags)

    def _tried(self, machine: Machine, edit: Mapping[str, str] | None = None) -> Tried:
        task = machine.task(edit, compiles=True)
        before, lay = _tree(Path(task.root)), set(machine.temporary.glob("*"))
        (answer,) = machine.run(task)
        after = _tree(Path(task.root))
        wrote = sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        left = sorted(one.name for one in set(machine.temporary.glob("*")) - lay)
        return Tried(answer, Path(task.scratch), wrote, left)


def _tree(root: Path) -> dict[str, object]:
    """What lies in a project: each file's bytes and time, and which directories there are."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        if path.is_file()
        else None
        for path in root.rglob("*")
    }


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)  # text, numbers and booleans are JSON's
