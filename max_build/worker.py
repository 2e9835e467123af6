"""The subprocess side of workers: the only place where a project's code or a compiler runs.

A worker reads one request a line from its standard input and answers each with one line on a
pipe of its own, so that whatever the project's code prints cannot be taken for an answer. It
leaves by `os._exit`: a process in which MAX compiled may abort in its destructors.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import msgspec

from max_build import compilers
from max_build.compilers import Derivation, Job, Memory
from max_build.errors import MaxBuildError, ToolchainError
from max_build.messages import Answer, Compiled, Derive, Derived, Failed, Request
from max_build.recipes.recorder import Recorder

__all__ = ["main"]


def main(answers: int) -> None:
    """Serve requests until the standard input ends, then leave without destructors."""
    _end_with_parent()
    requests = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    pipe = os.fdopen(answers, "wb")
    decoder = msgspec.json.Decoder(Request)
    server = _Server()
    for line in requests:
        answer = server.answer(decoder.decode(line))
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.write(msgspec.json.encode(answer) + b"\n")
        pipe.flush()
    os._exit(0)


def _failed(message: str, hint: str = "", toolchain: bool = False) -> Failed:
    """A failure in words that can be sent: the system's may hold bytes that are not UTF-8."""
    message, hint = (text.encode(errors="backslashreplace").decode() for text in (message, hint))
    return Failed(message, hint, toolchain)


class _Server:
    """Keeps what was derived last, which is what `Compile` means."""

    def __init__(self) -> None:
        self._last: tuple[Job, Derivation] | None = None
        self._memories: dict[str, Memory] = {}
        self._recorder = Recorder()

    def answer(self, request: Request) -> Answer:
        try:
            return self._derive(request) if isinstance(request, Derive) else self._compile()
        except MaxBuildError as error:
            return _failed(error.message, error.hint, isinstance(error, ToolchainError))
        except MemoryError:
            return Failed("the worker ran out of memory", "set `MAX_BUILD_JOBS=1`", False)
        except Exception as error:  # a bug of ours or of a third-party adapter: told, not hidden
            import traceback

            traceback.print_exc()
            return _failed(f"unexpected {type(error).__name__}: {error}")

    def _derive(self, request: Derive) -> Derived:
        job = request.job(self._memory(request.memory))
        derivation, recipe, always = self._recorder.derive(job)
        self._last = (job, derivation)
        ir = ""
        if derivation.ir is not None:
            path = job.scratch / "graph.ir"
            path.write_bytes(derivation.ir)
            ir = str(path)
        return Derived(derivation.components, ir, derivation.uncacheable, recipe, always)

    def _memory(self, folder: str) -> Memory | None:
        if folder and folder not in self._memories:
            from max_build.store.index import Memo

            self._memories[folder] = Memo(Path(folder))
        return self._memories.get(folder)

    def _compile(self) -> Compiled:
        assert self._last is not None, "Compile before Derive"
        job, derivation = self._last
        product = compilers.get(job.unit.compiler).compile(job, derivation)
        return Compiled(
            files={
                role: (str(found),) if isinstance(found, Path) else tuple(map(str, found))
                for role, found in product.files.items()
            },
            kernels=dict(product.kernels),
            inputs=product.inputs,
            outputs=product.outputs,
            weights=product.weights,
            arch=product.arch,
            uncacheable=product.uncacheable,
        )


def _end_with_parent() -> None:
    """Leave when the building process is gone, also in the middle of a long compile."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
