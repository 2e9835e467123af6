"""The records a command is about, by key, unit, target or lock, and what became of them."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from max_build.cli.project import print_json
from max_build.fields import words
from max_build.record import Record
from max_build.report.units import plural
from max_build.store.base import Store
from max_build.store.transfer import Moved, chosen, of_lock

__all__ = ["add_choice", "locked_of", "records_of", "report_moved", "without_record"]


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that narrow records down."""
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="keys or their beginnings (default: all records)"
    )
    parser.add_argument(
        "-u",
        "--unit",
        dest="units",
        action="append",
        default=[],
        metavar="UNIT",
        help="records of this unit; may be repeated",
    )
    parser.add_argument(
        "-t",
        "--target",
        dest="targets",
        action="extend",
        type=words,
        default=[],
        metavar="TARGET",
        help="records for this target; several by commas",
    )
    parser.add_argument(
        "--lock",
        type=Path,
        metavar="FILE",
        help="what this lock names: a file of `max-build build --lock`, or a wheel",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def locked_of(options: argparse.Namespace) -> dict[str, Record] | None:
    """Key → record of what the lock names and the other options leave; None without a lock.

    Raises
    ------
    StoreError
        If the file is no lock, or nothing in it fits.
    """
    if options.lock is None:
        return None
    from max_build.cli.lock import locked

    return locked(options.lock, options)


def records_of(store: Store, options: argparse.Namespace) -> tuple[list[Record], dict[str, str]]:
    """The records in a store that the options mean; and key → why not, of the others.

    Raises
    ------
    StoreError
        If the store cannot be listed, the file is no lock, or nothing in it fits.
    """
    lock = locked_of(options)
    if lock is not None:
        return of_lock(store, lock)
    records = list(chosen(store, keys=options.keys, units=options.units, targets=options.targets))
    return records, without_record(options, records, "nothing here fits")


def without_record(
    options: argparse.Namespace, records: Iterable[Record], reason: str
) -> dict[str, str]:
    """The keys, or beginnings of keys, that were asked for and fit no record; each → `reason`."""
    found = [record.key for record in records]
    asked: list[str] = options.keys
    return {key: reason for key in asked if not any(one.startswith(key) for one in found)}


def report_moved(result: Moved, options: argparse.Namespace, done: str) -> int:
    """Print what was moved; the exit status is 1 if anything was not."""
    if options.json:
        print_json(result)
    else:
        for key in result.moved:
            print(key)
        reasons = Counter(result.failed.values())
        for key, reason in sorted(result.failed.items()):
            if others := reasons.pop(reason, 0):
                more = f" and {plural(others - 1, 'other')}" if others > 1 else ""
                print(f"{key}{more}: {reason}", file=sys.stderr)
        print(f"{done} {plural(len(result.moved), 'record')}", file=sys.stderr)
    return 1 if result.failed else 0
