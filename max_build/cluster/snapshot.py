"""A project's sources as one blob, for a machine that does not have them.

The same files give the same bytes, so that an unchanged project is sent once. Left out is what no
compile reads: whatever is hidden (version control, `.env`), environments, what builds left behind,
private keys, and large files, which are weights. Whatever is left out in error shows as another
key, and the artifact is not used.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from max_build.errors import ConfigError
from max_build.record import Blob
from max_build.store.amounts import show_size

__all__ = ["FILE_LIMIT", "pack", "unpack"]

FILE_LIMIT = 16 << 20
"""Bytes from which a file is taken for weights."""

_LIMIT = 256 << 20
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY")
_FOLDERS = frozenset({"__pycache__", "build", "dist", "node_modules"})


def pack(root: Path, output: Path) -> Blob:
    """Write the sources below `root` into the tar file `output`.

    Raises
    ------
    ConfigError
        If there are more than 256 MiB of them, or one cannot be read.
    """
    try:
        found = sorted(_files(root), key=lambda path: path.as_posix())
        sizes = {path: path.lstat().st_size for path in found}
    except OSError as error:
        raise _unreadable(root, error) from error
    total = sum(sizes.values())
    if total > _LIMIT:
        largest = sorted(found, key=lambda path: -sizes[path])[:3]
        names = ", ".join(f"`{path.relative_to(root)}`" for path in largest)
        message = f"`{root}` holds {show_size(total)} of sources, too much to send to a farm"
        raise ConfigError(message, hint=f"keep data outside the project; the largest are {names}")
    try:
        with tarfile.open(output, "w", format=tarfile.PAX_FORMAT) as tar:
            for path in found:
                _add(tar, path, path.relative_to(root).as_posix())
        return Blob.of("sources", output.read_bytes())
    except OSError as error:
        raise _unreadable(root, error) from error


def _unreadable(root: Path, error: OSError) -> ConfigError:
    message = f"`{error.filename or root}` cannot be sent to a farm: {error.strerror}"
    return ConfigError(message)


def unpack(archive: Path, root: Path) -> None:
    """Put the files of `archive` below `root`, and nothing outside of it.

    Raises
    ------
    OSError, tarfile.TarError
        If it is damaged, names something outside, or there is no room.
    """
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    info = tarfile.TarInfo(name)
    if path.is_symlink():
        info.type = tarfile.SYMTYPE
        info.linkname = os.path.relpath(os.path.realpath(path), os.path.realpath(path.parent))
        tar.addfile(info)
        return
    data = path.read_bytes()
    info.size = len(data)
    info.mode = 0o755 if os.access(path, os.X_OK) else 0o644
    tar.addfile(info, io.BytesIO(data))


def _files(root: Path) -> Iterator[Path]:
    inside = os.path.realpath(root)
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        links = [one for one in folders if (here / one).is_symlink()]
        folders[:] = sorted(one for one in folders if one not in links and not _skipped(one))
        folders[:] = [one for one in folders if not (here / one / "pyvenv.cfg").exists()]
        for name in (*names, *links):
            path = here / name
            if name.startswith("."):
                continue
            if path.is_symlink():
                target = os.path.realpath(path)
                # What leads to itself leads to no file; `resolve` raises for it.
                if Path(target).is_relative_to(inside) and not os.path.islink(target):
                    yield path
            elif path.is_file() and path.stat().st_size < FILE_LIMIT and not _is_private(path):
                yield path


def _is_private(path: Path) -> bool:
    with path.open("rb") as file:
        return _PRIVATE_KEY.match(file.read(64)) is not None


def _skipped(folder: str) -> bool:
    return folder.startswith(".") or folder in _FOLDERS or folder.endswith(".egg-info")
