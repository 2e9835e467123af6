"""The machine, as recipes are held against it: everything is looked at once."""

from __future__ import annotations

import errno
import functools
import os
import stat
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib import machinery

from max_build import distributions
from max_build.key import canonical, digest
from max_build.recipes.places import within
from max_build.recipes.recipe import Kind, digest_of_value

__all__ = [
    "Here",
    "candidates_in",
    "is_site",
    "kind_of",
    "link_of",
    "listing_of",
    "names_in",
    "python",
    "size_of",
]

_SUFFIXES = ("", *machinery.all_suffixes())


def python() -> str:
    """The interpreter and the machine, such as `cpython 3.11.7 linux x86_64`."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    return f"{sys.implementation.name} {version} {sys.platform} {os.uname().machine}"


def candidates_in(names: frozenset[str], module: str) -> tuple[str, ...]:
    """Those of a directory's names that an import of `module` chooses among, sorted."""
    return tuple(sorted(name for suffix in _SUFFIXES if (name := module + suffix) in names))


# What these say is certain. Any other error, such as a server's that does not answer, leaves open
# what is there; a recipe must not rest on it, so the functions below raise it.
_NOTHING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def _look(path: str, *, follow: bool = True) -> os.stat_result | None:
    """What is at a path; None if nothing is."""
    try:
        return os.stat(path, follow_symlinks=follow)
    except OSError as error:
        if error.errno not in _NOTHING:
            raise
        return None


def kind_of(path: str) -> Kind:
    """What is at a path; of a file's permissions, whether its owner may execute it."""
    found = _look(path)
    if found is not None:
        if stat.S_ISDIR(found.st_mode):
            return "directory"
        return "executable" if found.st_mode & stat.S_IXUSR else "file"
    return "absent" if _look(path, follow=False) is None else "dangling link"


def link_of(path: str) -> str:
    """`digest_of_value` of where a symbolic link points; empty if it is none."""
    try:
        return digest_of_value(os.readlink(path))
    except OSError as error:
        if error.errno not in {errno.EINVAL, *_NOTHING}:
            raise
        return ""


def size_of(path: str) -> int:
    """Bytes of a regular file; -1 if it is none."""
    found = _look(path)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else -1


def listing_of(path: str) -> str:
    """Digest of a directory's names, and of what kind each is; empty if it is none."""
    try:
        with os.scandir(path) as entries:
            names = sorted(
                f"{one.is_dir():d}{one.is_file():d}{one.is_symlink():d}{one.name}"
                for one in entries
                if one.name != "__pycache__"
            )
    except OSError as error:
        if error.errno not in _NOTHING:
            raise
        return ""
    return digest(canonical([os.fsencode(name).hex() for name in names]))


def names_in(path: str) -> frozenset[str]:
    """A directory's names; none if there is no directory, or, as for an import, it is not ours."""
    try:
        return frozenset(os.listdir(path))
    except OSError as error:
        if error.errno not in {errno.EACCES, *_NOTHING}:
            raise
        return frozenset()


def is_site(directory: str) -> bool:
    """Whether a directory of `sys.path` belongs to the interpreter or to an installer."""
    if os.path.basename(directory) in {"site-packages", "dist-packages"}:
        return True
    own = _own()
    if directory in own or os.path.dirname(directory) in own:  # lib-dynload
        return True
    try:
        return any(name.endswith((".dist-info", ".egg-info")) for name in os.listdir(directory))
    except OSError:
        return False


def _finds(module: str, *, last: bool) -> str:
    """The finder of `sys.meta_path` that knows a module, such as one of an editable install.

    The interpreter's own are left out, and without `last` what comes after them.
    """
    for finder in sys.meta_path:
        if finder is machinery.PathFinder and not last:
            break
        if finder in (machinery.BuiltinImporter, machinery.FrozenImporter, machinery.PathFinder):
            continue
        try:
            found = finder.find_spec(module, None)
        except Exception as error:
            message = f"`{finder}` cannot be asked for `{module}`: {error}"
            raise ValueError(message) from error
        if found is not None:
            return getattr(finder, "__module__", None) or repr(finder)
    return ""


@functools.cache
def _own() -> frozenset[str]:
    """The interpreter's own directories."""
    paths = sysconfig.get_paths()
    return frozenset(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Here:
    """One project on this machine, as it is when something is first asked for.

    Make a new one for each build: nothing is looked at twice.

    Parameters
    ----------
    root
        The project's directory.
    python_path
        The directories it imports from; they belong to it wherever they lie.
    environ
        The environment that a worker would have.
    digest_of
        SHA-256 (hex) of a file; raises OSError.
    toolchain
        Distribution → version that the project vouches for.
    """

    def __init__(
        self,
        root: str,
        python_path: tuple[str, ...],
        environ: Mapping[str, str],
        digest_of: Callable[[str], str],
        toolchain: Mapping[str, str],
    ) -> None:
        self.root = root
        self._own = (root, *python_path)
        self._environ = environ
        self._digest_of = digest_of
        self._toolchain = {distributions.normalise(name): v for name, v in toolchain.items()}
        # One look each, shared by all units of a build.
        self.file = functools.cache(self._file)
        self.kind = functools.cache(self._kind)
        self.link = functools.cache(self._link)
        self.size = functools.cache(self._size)
        self.listing = functools.cache(self._listing)
        self.variable = functools.cache(self._variable)
        self.candidates = functools.cache(self._candidates)
        self.found = functools.cache(self._found)
        self._names = functools.cache(names_in)

    @functools.cached_property
    def python(self) -> str:
        """See `Surroundings`, as for the methods below."""
        return python()

    def identity(self, distribution: str) -> str:
        """What is installed under that name."""
        return distributions.identity(distribution) or ""

    def pin(self, distribution: str) -> str:
        """The version that the project vouches for."""
        return self._toolchain.get(distribution, "")

    def _file(self, path: str) -> str | None:
        try:
            return self._digest_of(self._at(path))
        except OSError:
            return None

    def _kind(self, path: str) -> Kind:
        return kind_of(self._at(path))

    def _link(self, path: str) -> str:
        return link_of(self._at(path))

    def _size(self, path: str) -> int:
        return size_of(self._at(path))

    def _listing(self, path: str) -> str:
        return listing_of(self._at(path))

    def _variable(self, name: str) -> str:
        value = self._environ.get(name)
        return "" if value is None else digest_of_value(value)

    def _candidates(self, directory: str, module: str) -> tuple[str, ...]:
        return candidates_in(self._names(self._at(directory)), module)

    def _found(self, module: str, *, installed: bool) -> str:
        *parents, name = module.split(".")
        for place, site in self._outside:
            if site and not installed:
                continue
            directory = os.path.join(place, *parents)
            found = candidates_in(self._names(directory), name)
            if found not in ((), (name,)) or (
                found and os.path.isdir(os.path.join(directory, name))
            ):
                return place
        return _finds(module, last=installed)

    @functools.cached_property
    def _outside(self) -> tuple[tuple[str, bool], ...]:
        """The directories of `sys.path` that are not the project's, and whether each is a site."""
        places = [one for one in dict.fromkeys(sys.path) if one and os.path.isdir(one)]
        return tuple((one, is_site(one)) for one in places if not self._is_own(one))

    def _is_own(self, place: str) -> bool:
        if os.path.basename(place) in {"site-packages", "dist-packages"}:
            return False  # an environment inside the project's directory
        return any(within(place, one) for one in self._own)

    def _at(self, path: str) -> str:
        return os.path.join(self.root, path)
