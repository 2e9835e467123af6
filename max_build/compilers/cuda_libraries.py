"""NVIDIA's compiler libraries: where they are, which build they are, and loading that one."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from max_build.compilers.files import Disk
from max_build.errors import ToolchainError
from max_build.stamp import Stamp

__all__ = ["NVJITLINK", "NVRTC", "Library"]

_HINT: Final = "install the extra `max-build[cuda]`"
_VERSION: Final = re.compile(rb"Cuda compilation tools, release [\d.]+, V(\d+\.\d+\.\d+)")
_CHANGE: Final = re.compile(rb"CL-\d{6,}")


@dataclass(frozen=True, slots=True)
class Library:
    """One library.

    Attributes
    ----------
    name
        As `cuda.pathfinder` and messages call it.
    places
        Directory and file in `site-packages` of the wheels of CUDA 13 and 12, in the order in
        which `cuda.pathfinder` looks.
    companion
        Pattern of a second library beside it that is part of the compiler, or empty.
    """

    name: str
    places: tuple[tuple[str, str], ...]
    companion: str = ""

    def find(self) -> Path:
        """Where the library is that will be loaded.

        One that came as a wheel is found by its place, which takes microseconds and loads
        nothing; any other is loaded to learn where it is.

        Raises
        ------
        ToolchainError
            There is none.
        """
        return self._wheel() or self.load()

    def build_id(
        self,
        memo: MutableMapping[str, tuple[Stamp, str]] | None = None,
        releases: MutableMapping[str, str] | None = None,
    ) -> str:
        """The full build, such as `nvrtc 12.9.86 CL-36037853 sha256:…` (of every file of it).

        It loads nothing, and with what it found before it takes a fraction of a millisecond. The
        version alone would not do: NVRTC 12.9.41 and 12.9.86 both call themselves 12.9.

        Parameters
        ----------
        memo
            As for `files.Disk`: the digest of 100 MB under its stamp.
        releases
            Digest of a library to its version and change list; read and added to.

        Raises
        ------
        ToolchainError
            There is none, or it is not whole.
        """
        releases = {} if releases is None else releases
        disk = Disk(memo)
        path = self.find()
        digests = []
        for part in self._parts(path):
            found = disk.find(str(part))
            if found is None:
                missing = f"there is no `{part}`"
                raise self._broken(missing)
            digests.append(found.digest)
        digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        return f"{self.name} {_release(path, digests[0], releases)} sha256:{digest}"

    def load(self) -> Path:
        """Load the library and its companion; return where it is.

        Raises
        ------
        ToolchainError
            There is none, or another than `find` found was loaded into this process before.
        """
        try:
            from cuda import pathfinder
        except ImportError as error:
            message = f"there is no {self.name}: `cuda-bindings` cannot be imported: {error}"
            raise ToolchainError(message, hint=_HINT) from error
        wheel = self._wheel()
        if wheel is not None:
            # `cuda.pathfinder` takes what is loaded before it looks in `site-packages`, and never
            # looks where an isolated build keeps its own.
            for part in reversed(self._parts(wheel)):
                try:
                    ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
                except OSError as error:
                    raise self._broken(str(error)) from error
        try:
            found = pathfinder.load_nvidia_dynamic_lib(self.name)
        except (pathfinder.DynamicLibNotFoundError, RuntimeError) as error:
            message = f"there is no {self.name} on this machine"
            raise ToolchainError(message, hint=_HINT) from error
        loaded = Path(os.path.realpath(found.abs_path))
        if wheel not in (None, loaded):
            message = f"`{loaded}` was loaded into this process before `{wheel}`"
            raise ToolchainError(message)
        return loaded

    def _wheel(self) -> Path | None:
        for directory, name in self.places:
            for root in sys.path:
                path = os.path.join(root or os.curdir, directory, name)
                if os.path.exists(path):
                    return Path(os.path.realpath(path))
        return None

    def _parts(self, path: Path) -> tuple[Path, ...]:
        if not self.companion:
            return (path,)
        return (path, *(sorted(path.parent.glob(self.companion)) or [path.parent / self.companion]))

    def _broken(self, why: str) -> ToolchainError:
        message = f"{self.name} is not whole: {why}"
        return ToolchainError(message, hint=_HINT)


def _release(path: Path, digest: str, releases: MutableMapping[str, str]) -> str:
    """Version and change list as they stand in the library, remembered under its digest."""
    if digest not in releases:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            version = _VERSION.search(data)
            change = _CHANGE.search(data)
            words = (version[1] if version else b"?", change[0] if change else b"?")
        releases[digest] = b" ".join(words).decode()
    return releases[digest]


NVRTC: Final = Library(
    "nvrtc",
    (("nvidia/cu13/lib", "libnvrtc.so.13"), ("nvidia/cuda_nvrtc/lib", "libnvrtc.so.12")),
    "libnvrtc-builtins.so.*",
)
NVJITLINK: Final = Library(
    "nvJitLink",
    (("nvidia/cu13/lib", "libnvJitLink.so.13"), ("nvidia/nvjitlink/lib", "libnvJitLink.so.12")),
)
