"""What is tried under faults: each step's files, what it does, and what may come of it."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kernel_repos
import toy_repo
from max_build import load_kernels, load_settings, manifest, open_cache
from max_build.key import digest
from max_build.packaging import manifest_of
from max_build.pipeline import build
from max_build.runtime import locate
from max_build.store import CacheSettings, Hit
from max_build.store.directory import DirectoryStore
from max_build.store.gc import gc
from max_build.store.verify import verify

UNIT = """
import os
from toy import part

def build(target):
    here = os.path.dirname(__file__)
    with open(os.path.join(here, "table.txt")) as file:
        text = part.NAME + file.read()
    extra = os.path.join(here, "extra.txt")
    if os.path.exists(extra):
        with open(extra) as file:
            text += file.read()
    return text * 9000
"""
WHOLE = b"part one table one\n" * 9000
EDITS = {
    "part": ("part.py", "NAME = 'part two '\n", b"part two table one\n" * 9000),
    "table": ("table.txt", "table two\n", b"part one table two\n" * 9000),
    "extra": ("extra.txt", "extra\n", b"part one table one\nextra\n" * 9000),
}
"""What is edited after a build: the file, its new text, and the artifact that has to come of it."""


@dataclass(frozen=True)
class Box:
    """The folders of one run, all below `root`."""

    root: Path

    def __post_init__(self) -> None:
        for name in ("cache", "project", "shared", "wheel"):
            object.__setattr__(self, name, self.root / name)

    cache: Path = Path()
    project: Path = Path()
    shared: Path = Path()
    wheel: Path = Path()

    @property
    def settings(self) -> CacheSettings:
        there = "shared" in os.listdir(self.root)  # by no call that is watched
        shared = str(self.shared) if there else ""
        return CacheSettings(dir=str(self.cache), shared=shared, lease=5.0)


Ease = Callable[[bool], None]
"""Holds the faults, with True; lets them come again, with False."""

Act = Callable[[Box, Ease], tuple[str, list[bytes]]]
"""Does the step; its state and the artifacts it gave."""


@dataclass(frozen=True)
class Step:
    """Something that is done under faults.

    Parameters
    ----------
    prepare
        Makes the files, without faults.
    act
        See `Act`.
    watched
        The folders whose calls are counted.
    states
        What may come of it.
    artifacts
        Each is what may come with that.
    refuses
        Whether a `MaxBuildError` will do: the fault is in what only the user can mend.
    lies
        Errors that say that a file is not there, or not for us: what the project then is, is
        another project, whose artifact may be an older one.
    after
        Done without faults afterwards, in place of `act`.
    healed
        The artifacts that have to come of that; the same as `artifacts` if empty.
    clock
        Seconds the clock is off in every run.
    keeps
        Whether nothing is changed by it, so that its files are made anew only after damage.
    """

    prepare: Callable[[Box], None]
    act: Act
    watched: tuple[str, ...]
    states: tuple[str, ...]
    artifacts: tuple[bytes, ...] = ()
    refuses: bool = False
    lies: tuple[str, ...] = ()
    after: Act | None = None
    healed: tuple[bytes, ...] = ()
    clock: int = 0
    keeps: bool = False


# --- builds


def project(box: Box) -> None:
    toy_repo.write_project(box.project, unit=UNIT, part="NAME = 'part one '\n")
    (box.project / "src" / "toy" / "table.txt").write_text("table one\n")


def built(box: Box) -> None:
    project(box)
    assert build_toy(box, lambda _: None) == ("compiled", [WHOLE])


def sharing(box: Box) -> None:
    project(box)
    box.shared.mkdir()
    box.shared.chmod(0o2775)


def shared(box: Box) -> None:
    sharing(box)
    assert build_toy(box, lambda _: None) == ("compiled", [WHOLE])
    shutil.rmtree(box.cache)


def edited(box: Box, edit: str) -> None:
    built(box)
    name, text, _ = EDITS[edit]
    (box.project / "src" / "toy" / name).write_text(text)


def build_toy(box: Box, ease: Ease) -> tuple[str, list[bytes]]:
    settings = load_settings(box.project)
    with open_cache(box.settings) as cache:
        (outcome,) = build(settings, cache).outcomes
        if outcome.error is not None:
            raise outcome.error
        paths = [cache.path(blob) for blob in outcome.record.blobs if blob.role == "ptx"]
        ease(True)
        data = [path.read_bytes() for path in paths]
        ease(False)
    return outcome.state, data


# --- loads


def packed(box: Box, *, embedded: bool) -> None:
    """What a wheel of the toy would bring."""
    built(box)
    settings = load_settings(box.project)
    folder = box.wheel / "toy" / manifest.FOLDER
    folder.mkdir(parents=True)
    with open_cache(box.settings) as cache:
        found = manifest_of(settings, build(settings, cache), "toy")
        found = manifest.make("toy", found.units.items(), embedded=embedded)
        (folder / manifest.NAME).write_bytes(manifest.encode(found))
        for blob in found.blobs() if embedded else ():
            shutil.copyfile(cache.path(blob), folder / manifest.file_name(blob))


def editable(box: Box) -> None:
    """What an editable install leaves in site-packages."""
    packed(box, embedded=False)
    text = (box.wheel / "toy" / manifest.FOLDER / manifest.NAME).read_text()
    shutil.rmtree(box.wheel)
    origin = {"url": box.project.as_uri(), "dir_info": {"editable": True}}
    files = {
        "toy-1.0.dist-info/direct_url.json": json.dumps(origin),
        f"toy-1.0.dist-info/extra_metadata/{manifest.METADATA_NAME}": text,
    }
    toy_repo.write_distribution(box.wheel, "toy", "1.0", files)


def load_toy(box: Box, ease: Ease, source: str | None = None) -> tuple[str, list[bytes]]:
    os.environ["MAX_BUILD_CACHE_DIR"] = str(box.cache)
    installed = locate.find(source or box.wheel / "toy" / manifest.FOLDER)
    paths = [installed.artifact(blob) for blob in installed.manifest.blobs()]
    ease(True)
    return "loaded", [path.read_bytes() for path in paths]


def load_editable(box: Box, ease: Ease) -> tuple[str, list[bytes]]:
    ease(True)
    sys.path[:0] = [str(box.wheel), str(box.project / "src")]
    toy_repo.forget()
    ease(False)
    return load_toy(box, ease, "toy")


# --- kernels, which the building process keys itself


def kernels(box: Box) -> None:
    table = 'source = "kernels/chain.cu"\ninclude-dirs = ["early", "include"]'
    repo = kernel_repos.make(box.project, kernel_repos.CHAIN, {"chain": table})
    (box.project / "early").mkdir()
    os.environ["MAX_BUILD_CACHE_DIR"] = str(box.cache)
    assert repo.one().state == "compiled"


def kernels_edited(box: Box) -> None:
    """A header has come to be found before the one that was compiled."""
    kernels(box)
    other = kernel_repos.CHAIN["include/second.cuh"].replace("2.0f", "4.0f")
    (box.project / "early" / "second.cuh").write_text(other)


def kernels_packed(box: Box) -> None:
    kernels(box)
    settings = load_settings(box.project)
    box.wheel.mkdir()
    with open_cache(box.settings) as cache:
        found = manifest_of(settings, build(settings, cache), "repo")
        (box.wheel / manifest.NAME).write_bytes(manifest.encode(found))
        for blob in found.blobs():
            shutil.copyfile(cache.path(blob), box.wheel / manifest.file_name(blob))


def look_up_kernels(box: Box, ease: Ease) -> tuple[str, list[bytes]]:
    """The look of an all-hit build; a miss stays one, and takes no worker."""
    settings = load_settings(box.project)
    with open_cache(box.settings) as cache:
        found = build(settings, cache, mode="look")
    (outcome,) = found.outcomes
    if outcome.error is not None:
        raise outcome.error
    return outcome.state, []


def load_chain(box: Box, ease: Ease) -> tuple[str, list[bytes]]:
    os.environ["MAX_BUILD_CACHE_DIR"] = str(box.cache)
    assert list(load_kernels(box.wheel, device="sm_90")) == ["chain"]
    return "loaded", []


# --- upkeep


def several(box: Box) -> None:
    """Three artifacts of one unit, and a blob that nothing names."""
    built(box)
    for edit in ("part", "table"):
        name, text, _ = EDITS[edit]
        path = box.project / "src" / "toy" / name
        before = path.read_text()
        path.write_text(text)
        build_toy(box, lambda _: None)
        path.write_text(before)
    data = b"left over"
    with open_cache(box.settings) as cache:
        cache.local.store.put_blob(digest(data), io.BytesIO(data))


def collect(box: Box, ease: Ease, max_size: int | None = None) -> tuple[str, list[bytes]]:
    gc(DirectoryStore(box.cache), grace=0, max_size=max_size)
    return "collected", []


def check(box: Box, ease: Ease) -> tuple[str, list[bytes]]:
    verify(DirectoryStore(box.cache))
    return "verified", []


def look_up_all(box: Box, ease: Ease, *, there: bool) -> tuple[str, list[bytes]]:
    """Every record is whole, or not there."""
    with open_cache(box.settings) as cache:
        records = cache.records_of("unit")
        found = [cache.lookup(one.key) for one in records]
        whole = [one.record for one in found if isinstance(one, Hit)]
        assert not there or len(whole) == 3, found
        return "", [cache.path(one.blobs[0]).read_bytes() for one in whole if one.blobs]


_ALL = (WHOLE, *(data for _, _, data in EDITS.values()))
_BUILT = ("cached", "compiled")

STEPS = {
    "hit": Step(built, build_toy, ("cache",), _BUILT, (WHOLE,), clock=10, keeps=True),
    "load": Step(
        partial(packed, embedded=True),
        load_toy,
        ("wheel",),
        ("loaded",),
        (WHOLE,),
        refuses=True,
        keeps=True,
    ),
    "load-from-cache": Step(
        partial(packed, embedded=False),
        load_toy,
        ("wheel", "cache"),
        ("loaded",),
        (WHOLE,),
        refuses=True,
        after=build_toy,
    ),
    "load-editable": Step(
        editable,
        load_editable,
        ("wheel", "cache", "project"),
        ("loaded",),
        (WHOLE,),
        refuses=True,
        after=build_toy,
    ),
    "miss": Step(project, build_toy, ("cache",), ("compiled",), (WHOLE,)),
    "hit-project": Step(
        built, build_toy, ("project",), _BUILT, (WHOLE,), refuses=True, clock=10, keeps=True
    ),
    "publish": Step(sharing, build_toy, ("shared",), _BUILT, (WHOLE,)),
    "fetch": Step(shared, build_toy, ("shared",), _BUILT, (WHOLE,)),
    "collect": Step(
        several,
        collect,
        ("cache",),
        ("collected",),
        refuses=True,
        lies=("ENOENT",),
        after=partial(look_up_all, there=True),
        healed=_ALL,
    ),
    "empty": Step(
        several,
        partial(collect, max_size=0),
        ("cache",),
        ("collected",),
        refuses=True,
        lies=("ENOENT",),
        after=partial(look_up_all, there=False),
        healed=_ALL,
    ),
    "verify": Step(
        several,
        check,
        ("cache",),
        ("verified",),
        refuses=True,
        after=partial(look_up_all, there=False),
        healed=_ALL,
    ),
    **{
        f"edited-{edit}": Step(
            partial(edited, edit=edit),
            build_toy,
            ("project",),
            _BUILT,
            # The project's own code asks whether `extra` is there, and takes any error for a no.
            (new, WHOLE) if edit == "extra" else (new,),
            refuses=True,
            lies=("ENOENT", "EACCES"),
            healed=(new,),
        )
        for edit, (_, _, new) in EDITS.items()
    },
    "kernels-hit": Step(
        kernels,
        look_up_kernels,
        ("project", "cache"),
        ("cached", "missed"),
        refuses=True,
        keeps=True,
    ),
    "kernels-edited": Step(
        kernels_edited,
        look_up_kernels,
        ("project", "cache"),
        ("missed",),
        refuses=True,
        lies=("ENOENT", "EACCES"),
        keeps=True,
    ),
    "kernels-load": Step(
        kernels_packed, load_chain, ("wheel", "cache"), ("loaded",), refuses=True, keeps=True
    ),
}
