"""`max-build gc`: make room in a cache directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from max_build.cli.project import cache_of, opened, print_json
from max_build.cli.tiers import directory_of
from max_build.errors import StoreError
from max_build.store.amounts import parse_age, parse_size, show_size
from max_build.store.directory import DirectoryStore
from max_build.store.settings import CacheSettings

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "gc",
        help="make room in a cache directory",
        description="Remove the entries that were used longest ago, and blobs no entry names. "
        "Safe while others read, write and collect. A bucket is better served by its own "
        "lifecycle rule.",
        allow_abbrev=False,
    )
    parser.add_argument("--tier", choices=("local", "shared", "remote"), default="local")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="a cache directory, in place of a tier"
    )
    parser.add_argument(
        "--max-size", type=_amount(parse_size), metavar="SIZE", help="stay under this, e.g. 20GB"
    )
    parser.add_argument(
        "--max-age", type=_amount(parse_age), metavar="AGE", help="unused for longer goes, e.g. 30d"
    )
    parser.add_argument(
        "--grace",
        type=_amount(parse_age),
        default=3600.0,
        metavar="AGE",
        help="what was used in this time stays (default: 1h)",
    )
    parser.add_argument("--pin", action="append", default=[], metavar="KEY", help="keep this entry")
    parser.add_argument("--unpin", action="append", default=[], metavar="KEY", help="no longer so")
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Collect."""
    from max_build.report.units import plural
    from max_build.store.gc import gc, pin

    def collect(store: DirectoryStore, limit: int | None) -> int:
        for key in options.pin:
            pin(store, _whole(store, key))
        for key in options.unpin:
            pin(store, _whole(store, key), pinned=False)
        report = gc(
            store,
            max_size=options.max_size if options.max_size is not None else limit,
            max_age=options.max_age,
            grace=options.grace,
            dry_run=options.dry_run,
        )
        if options.json:
            print_json(report)
        else:
            would = "would remove" if options.dry_run else "removed"
            print(
                f"{would} {report.entries} entries and {report.blobs} blobs, "
                f"{show_size(report.freed)}; {show_size(report.left)} stay"
            )
            if report.leftovers:
                left = plural(report.leftovers, "old file")
                print(f"{would} {left} of interrupted writers or put aside as damaged")
        return 0

    if options.dir is not None:
        if not options.dir.is_dir():
            message = f"`{options.dir}` is not a directory"
            raise StoreError(message)
        return collect(_cache_in(options.dir), None)
    settings = cache_of(options)
    with opened(settings) as cache:
        store = directory_of(cache, options.tier)
        if not store.writable:
            _refuse(settings, options.tier, store)
        return collect(store, settings.max_size if options.tier == "local" else None)


def _cache_in(folder: Path) -> DirectoryStore:
    """The cache in a folder; whoever names another one must not lose what is there."""
    store = DirectoryStore(folder)
    if not store.tagged() and not any((folder / kind).is_dir() for kind in ("ac", "cas")):
        message = f"`{folder}` is no cache of max-build"
        raise StoreError(message, hint="a cache has a `CACHEDIR.TAG`, and folders `ac` and `cas`")
    return store


def _refuse(settings: CacheSettings, tier: str, store: DirectoryStore) -> NoReturn:
    modes = {"shared": settings.shared_mode, "remote": settings.remote_mode}
    asked = modes.get(tier) == "read"
    hint = f"set `MAX_BUILD_{tier.upper()}_MODE=read-write`" if asked else "you may not write to it"
    message = f"{tier} cache `{store.root}` is read-only"
    raise StoreError(message, kind="read-only", hint=hint)


def _whole(store: DirectoryStore, key: str) -> str:
    """The one key that begins with `key`."""
    found = [item.name for item in store.list("ac") if item.name.startswith(key)]
    if len(found) != 1:
        message = f"{len(found)} entries have a key that begins with {key!r}"
        raise StoreError(message, hint="`max-build show UNIT` prints keys in full")
    return found[0]


def _amount(parse: Any) -> Any:
    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read
