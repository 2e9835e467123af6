"""`max-build weights`: what is in a weights file, and what differs between two."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from max_build.cli.project import print_json
from max_build.runtime.devices import cuda_driver
from max_build.weights import Weights, open_weights
from max_build.weights.fingerprint import Difference, Fingerprint, compare, fingerprint
from max_build.weights.gds import gds_reason

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "weights",
        help="a weights file's tensors; with two files, what differs",
        description="List the tensors of safetensors or GGUF weights, with types, sizes, shards "
        "and problems; with two, say what differs (exit status 1 if anything does).",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="WEIGHTS", help="a file, an index, a shard or a directory")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="weights to compare with")
    parser.add_argument(
        "--fingerprint", action="store_true", help="add the XXH3 of each tensor and of all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """List or compare; 1 if the two differ."""
    if options.other is not None:
        return _compare(options)
    weights = open_weights(options.path)
    digests = fingerprint(weights, _progress("hashed")) if options.fingerprint else None
    if options.json:
        print_json(_described(weights, digests))
    else:
        print("\n".join(_lines(weights, digests)))
    for problem in weights.problems:
        print(f"max-build: {problem}", file=sys.stderr)
    return 0


def _described(weights: Weights, digests: Fingerprint | None) -> dict[str, Any]:
    tensors = {}
    for name, tensor in weights.items():
        tensors[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "nbytes": tensor.nbytes,
            "file": tensor.path,
            "offset": tensor.offset,
        }
        if digests is not None:
            tensors[name]["xxh3"] = digests.tensors[name]
    found: dict[str, Any] = {
        "files": [
            {
                "path": shard.file.path,
                "format": shard.header.format,
                "size": shard.file.size,
                "tensors": len(shard.header.entries),
                "gds": gds_reason(shard.file.path),
            }
            for shard in weights.shards
        ],
        "nbytes": weights.nbytes,
        "problems": weights.problems,
        "tensors": tensors,
    }
    if digests is not None:
        found["xxh3"] = digests.total
    return found


def _lines(weights: Weights, digests: Fingerprint | None) -> list[str]:
    lines = []
    width = max((len(name) for name in weights), default=0)
    kind = max((len(tensor.dtype) for tensor in weights.values()), default=0)
    several = len(weights.shards) > 1
    for name, tensor in weights.items():
        parts = [f"{name:{width}}", f"{tensor.dtype:{kind}}", f"{_size(tensor.nbytes):>9}"]
        if digests is not None:
            parts.append(digests.tensors[name])
        parts.append("×".join(map(str, tensor.shape)) or "scalar")
        if several:
            parts.append(f"in {tensor.path}")
        lines.append("  ".join(parts))
    files = f" in {len(weights.shards)} files" if several else ""
    total = f"  xxh3 {digests.total}" if digests is not None else ""
    lines.append(f"{len(weights)} tensors, {_size(weights.nbytes)}{files}{total}")
    if cuda_driver() is not None:
        reason = next(filter(None, map(gds_reason, weights.files)), "")
        way = f"through pinned buffers ({reason})" if reason else "by cuFile"
        lines.append(f"to a GPU {way}")
    return lines


def _compare(options: argparse.Namespace) -> int:
    found = compare(open_weights(options.path), open_weights(options.other))
    if options.json:
        print_json(
            {
                "removed": found.removed,
                "added": found.added,
                "retyped": found.retyped,
                "changed": found.changed,
            }
        )
    else:
        print("\n".join(_differences(found)) or "the tensors are the same")
    return 1 if found else 0


def _differences(found: Difference) -> list[str]:
    named = (
        ("only in the first", found.removed),
        ("only in the second", found.added),
        ("other type or shape", found.retyped),
        ("other values", found.changed),
    )
    return [f"{what:19}  {name}" for what, names in named for name in names]


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


def _progress(verb: str) -> Callable[[int, int], None] | None:
    """Return what shows progress on a terminal, at each tenth of the way."""
    if not sys.stderr.isatty():
        return None
    import time

    begun, shown = time.perf_counter(), -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        tenth = done * 10 // max(total, 1)
        if tenth > shown:
            shown = tenth
            speed = done / max(time.perf_counter() - begun, 1e-9) / 1e9
            end = "\n" if done >= total else ""
            text = f"\r{verb} {_size(done)} of {_size(total)}, {speed:.1f} GB/s"
            print(text, end=end, file=sys.stderr, flush=True)

    return show
