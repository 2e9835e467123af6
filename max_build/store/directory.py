"""A directory as a store: the developer's own, or one that a team shares.

Nothing here relies on locks, on `exists`, or on what another machine may see late. A file appears
under its final name whole or not at all, and readers verify what they read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from max_build.errors import StoreError
from max_build.store.base import (
    CHUNK,
    Item,
    Kind,
    Sink,
    SinkError,
    Store,
    fault_of,
)
from max_build.store.files import (
    ABSENT,
    MAKERS,
    Reading,
    again,
    names_in,
    on_nfs3,
    open_regular,
    read_opened,
    read_small,
    scan,
)
from max_build.store.names import aside, new_folder, temporary

__all__ = ["DirectoryStore"]

T = TypeVar("T")

_NAME = re.compile(r"[0-9a-f]{64}\Z")
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# A max-build cache.\n"

_SYNCED = 8 << 20  # bytes
_TOUCH_AFTER = 600.0  # well within the grace of gc, which has to see what is in use


class DirectoryStore(Store):
    """`ac/<2>/<key>` and `cas/<2>/<sha256>` below `root`, each written beside and moved in.

    Parameters
    ----------
    root
        An existing directory; StoreError if it is not.
    label
        The tier's name.
    writable
        Whether to change anything in it.
    shared
        A team's directory: modes 2775 and 0664 whatever the umask is, blobs as zstd frames, and
        distrust of what a network file system says is absent. Otherwise directories take the
        mode of `root`, files are 0444, and blobs raw, so that they can be mapped.
    """

    unseen = _SYNCED

    def __init__(
        self,
        root: Path,
        label: str = "local",
        *,
        writable: bool = True,
        shared: bool = False,
    ) -> None:
        self.root = root
        self._root = str(root)
        self.label = label
        self.writable = writable
        self._shared = shared
        self._file_mode = 0o664 if shared else 0o444
        self._last_read = ("", 0.0)  # the key and mtime of an entry; what is touched was just read
        with self._reading(root):
            info = os.stat(root)
        self._group = info.st_gid
        self._folder_mode = 0o2775 if shared else stat.S_IMODE(info.st_mode) & 0o755

    def tag(self) -> None:
        """Mark the directory as a cache, for backup programs; do nothing where that fails."""
        path = self.root / "CACHEDIR.TAG"
        with contextlib.suppress(OSError):
            if self.writable and not path.exists():
                with self._staged(path, replace=True) as file:
                    file.write(_TAG)

    def tagged(self) -> bool:
        """Whether it is marked as a cache of ours."""
        try:
            return (self.root / "CACHEDIR.TAG").read_bytes() == _TAG
        except OSError:
            return False

    def path(self, kind: Kind, name: str) -> Path:
        """Where a name lies, whether or not it does."""
        return self.root / f"{kind}/{name[:2]}/{name}"

    def place(self, kind: Kind, name: str) -> str:
        """The same as text: a build asks for thousands."""
        return f"{self._root}/{kind}/{name[:2]}/{name}"

    def folder(self, name: str) -> Path:
        """A folder of the store's own (`tmp`, `quarantine`, …), made if it is not there."""
        return self._make(self.root / name)

    def within(self, folder: Path, act: Callable[[Path], T]) -> T:
        """What `act` gives in a folder, which is made if it is not there.

        Whoever makes a folder moves it in, and thereby takes away an empty one that another has
        just made. So it is done again where it fails for want of the folder; each of those who
        make it at the same time can be in the way once.
        """
        for left in reversed(range(MAKERS)):
            try:
                return act(self._make(folder))  # its parent can go in the same way
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ESTALE} or not left:
                    raise
                names_in(folder)  # so that an NFS client asks for it anew, and for its name
                self._seen(folder)
        raise AssertionError

    # --- entries

    def get_entry(self, key: str) -> bytes | None:
        path = self.place("ac", key)

        def read() -> bytes | None:
            opened = open_regular(path)
            if opened is None:
                return None
            self._last_read = (key, opened[1].st_mtime)
            return read_opened(*opened, path)

        with self._reading(path):
            data = again(read)
            return read() if data is None and self._listed(Path(path)) else data

    def put_entry(self, key: str, data: bytes, *, replace: bool = False) -> bool:
        path = self.path("ac", key)
        if not replace and os.path.lexists(path):
            return False
        with self._writing(path), self._staged(path, replace=replace) as file:
            file.write(data)
        return True

    def touch(self, key: str) -> None:
        """Note that an entry was used, at most every ten minutes; gc goes by this time."""
        last, used = self._last_read
        # A skewed clock makes this happen too often or too late; what is written is the
        # file system's own time either way.
        late = time.time() - _TOUCH_AFTER
        if not self.writable or (last == key and used > late):
            return
        with contextlib.suppress(OSError):
            path = self.place("ac", key)
            if os.lstat(path).st_mtime <= late:
                os.utime(path, follow_symlinks=False)

    # --- blobs

    def get_blob(self, digest: str, sink: Sink) -> bool:
        path = self.path("cas", digest)

        def pour() -> bool:
            opened = open_regular(path)
            if opened is None and self._listed(path):
                opened = open_regular(path)
            if opened is None:
                return False
            with os.fdopen(opened[0], "rb", buffering=0) as file:
                self._pour(file, sink)
            return True

        with self._reading(path):
            return again(pour, unless=lambda: sink.count > 0)

    def put_blob(self, digest: str, source: BinaryIO) -> None:
        path = self.path("cas", digest)
        with self._writing(path), self._staged(path, replace=True) as file:
            if self._shared:
                from max_build.store.compress import deflate

                deflate(source, _Synced(file))
            else:
                shutil.copyfileobj(source, file, CHUNK)

    def has_blob(self, digest: str) -> bool:
        path = self.path("cas", digest)
        with self._reading(path):
            try:
                return stat.S_ISREG(again(lambda: os.lstat(path)).st_mode)
            except OSError as error:
                if error.errno in ABSENT:
                    return self._listed(path)
                raise

    def refresh(self, digest: str) -> None:
        """Start the grace period of a blob again, since a record is about to name it."""
        with contextlib.suppress(OSError):
            os.utime(self.path("cas", digest), follow_symlinks=False)

    @contextlib.contextmanager
    def receive(self, digest: str, size: int) -> Iterator[Sink]:
        """A sink for a blob, which is kept when the block ends, if it is that blob.

        Raises
        ------
        StoreError
            `corrupt` if something else was poured in, `mismatch` if it is the blob and shorter;
            another kind if it cannot be written.
        """
        path = self.path("cas", digest)
        with self._writing(path), self._staged(path, replace=True) as file:
            sink = Sink(file, size)
            try:
                yield sink
            except SinkError as error:
                if isinstance(error.__cause__, OSError):
                    raise error.__cause__ from error
                raise
            finally:
                sink.cancelled = True  # whoever still writes does so for nobody
            if not sink.holds(digest):
                message = f"{sink.count} bytes arrived that are not blob {digest[:12]}"
                right = sink.digest() == digest  # and less than its record says
                raise StoreError(message, kind="mismatch" if right else "corrupt")

    # --- leases

    def take_lease(self, key: str, owner: bytes) -> bool:
        path = self.root / "lease" / key
        with self._writing(path):
            if os.path.lexists(path):
                return False
            with self._staged(path, replace=False) as file:
                file.write(owner)
            return self._lease_owner(path) == owner

    def lease_mark(self, key: str) -> str | None:
        path = self.root / "lease" / key

        def mark() -> str | None:
            opened = open_regular(path)  # since a network file system asks anew only then
            if opened is None:
                return None
            fd, info = opened
            os.close(fd)
            return f"{info.st_ino} {info.st_mtime_ns}"

        with self._reading(path):
            return again(mark)

    def renew_lease(self, key: str, owner: bytes) -> None:
        path = self.root / "lease" / key
        with self._writing(path):
            if self._lease_owner(path) == owner:
                os.utime(path, follow_symlinks=False)

    def drop_lease(self, key: str, owner: bytes | None) -> None:
        path = self.root / "lease" / key
        with self._writing(path):
            if owner is None or self._lease_owner(path) == owner:
                path.unlink(missing_ok=True)

    # --- upkeep

    def list(self, kind: Kind) -> Iterator[Item]:
        top = self.root / kind
        with self._reading(top):
            for shard in scan(top):
                for found in scan(shard.path):
                    if not _NAME.match(found.name):
                        continue
                    try:
                        info = found.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield Item(kind, found.name, info.st_size, info.st_mtime)

    def delete(self, kind: Kind, name: str) -> None:
        path = self.path(kind, name)
        if kind == "cas" and self._mapped_elsewhere:
            self.discard(kind, name)
            return
        with self._writing(path):
            try:
                path.unlink()
            except OSError as error:
                if error.errno not in ABSENT:
                    raise

    def discard(self, kind: Kind, name: str) -> None:
        """Move a damaged file into `quarantine/`, for somebody to look at; gc clears it."""
        path = self.path(kind, name)
        with self._writing(path):
            try:
                self._set_aside(path)
            except FileNotFoundError:
                return
            except OSError:  # e.g. no room for a new name: then without the look
                path.unlink(missing_ok=True)

    def now(self) -> float:
        """The present by the clock that stamps this directory's files."""
        with self._writing(self.root):
            try:
                return self._now()
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                    raise
            # No room for a file, when room is to be made.
            os.utime(self.root)
            return os.stat(self.root).st_mtime

    # --- below

    @functools.cached_property
    def _mapped_elsewhere(self) -> bool:
        """Whether other machines may have files mapped that die with their last name.

        That is a home directory on NFS before version 4, whose server does not know what is open:
        a page that is read after the file is gone ends the process (SIGBUS). So blobs there are
        moved aside, and their room is free when gc clears that. A team's directory is not mapped.
        """
        return not self._shared and on_nfs3(self.root)

    def _lease_owner(self, path: Path) -> bytes | None:
        return again(lambda: read_small(path))

    def _listed(self, path: Path) -> bool:
        """Whether a name that was not found is there after all."""
        return self._shared and self._seen(path)

    def _seen(self, path: Path) -> bool:
        """Whether a name is there, whatever an NFS client remembers of it.

        For up to a minute it may take a name for absent, be it a file's or its folder's, or a
        folder for the one that it was. Listing what the name lies in makes it ask the server.
        """
        if path == self.root:
            return False
        names = names_in(path.parent)
        if names is None and self._seen(path.parent):
            names = names_in(path.parent)
        return names is not None and path.name in names

    def _now(self) -> float:
        path, fd = self._created()
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)

    def _created(self) -> tuple[Path, int]:
        """A new file below `tmp`, for its maker alone, and its descriptor."""

        def create(folder: Path) -> tuple[Path, int]:
            path = folder / temporary()
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

        return self.within(self.root / "tmp", create)

    def _pour(self, file: BinaryIO, sink: Sink) -> None:
        if not self._shared:
            shutil.copyfileobj(file, sink, CHUNK)
            return
        from max_build.store.compress import Inflater

        inflater = Inflater(sink)
        while chunk := file.read(CHUNK):
            inflater.feed(chunk)
        inflater.finish()

    @contextlib.contextmanager
    def _staged(self, final: Path, *, replace: bool) -> Iterator[BinaryIO]:
        temp, fd = self._created()
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
                file.flush()
                os.fchmod(fd, self._file_mode)
                os.fsync(fd)
            # Closed by now: network file systems report a full disk as late as that.
            self._install(temp, final, replace=replace)
        finally:
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)

    def _install(self, temp: Path, final: Path, *, replace: bool) -> None:
        def install(_folder: Path) -> None:
            if not replace:
                with contextlib.suppress(OSError):
                    os.link(temp, final, follow_symlinks=False)
                # Lost to another writer (some file systems say EPERM), or no hard links here.
                if os.path.lexists(final):
                    return
            elif (final.is_dir() and not final.is_symlink()) or (
                self._mapped_elsewhere and os.path.lexists(final)
            ):
                self._set_aside(final)
            temp.replace(final)

        self.within(final.parent, install)

    def _set_aside(self, path: Path) -> None:
        kind = path.relative_to(self.root).parts[0]
        path.rename(self.folder("quarantine") / aside(kind, path.name))

    def _make(self, folder: Path) -> Path:
        """Make a folder that has its mode, not the umask's, from the moment it can be seen."""
        if folder.is_dir():
            return folder
        if folder.parent != self.root:
            self._make(folder.parent)
        new = self.root / new_folder()
        new.mkdir(0o700)
        try:
            if self._shared:  # where the root does not hand it down by its own mode
                with contextlib.suppress(OSError):
                    os.chown(new, -1, self._group)
            new.chmod(self._folder_mode)
            new.rename(folder)
        except OSError:
            new.rmdir()
            if not folder.is_dir() and not self._seen(folder):  # somebody else's is as good
                raise
        return folder

    def _reading(self, path: Path | str) -> Reading:
        return Reading(self.label, path)

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        if not self.writable:
            message = f"{self.label} cache `{self.root}` is read-only"
            raise StoreError(message, kind="read-only")
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise fault_of(error, f"{self.label} cache cannot write `{path}`") from error


class _Synced:
    """A file that takes no more than has nearly reached the disk, for whoever watches it fill."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._ahead = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._file.write(data)
        self._ahead += len(data)
        if self._ahead >= _SYNCED:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._ahead = 0
