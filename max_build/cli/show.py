"""`max-build show UNIT`: the record of a unit, and the machine code in its artifacts."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from max_build.cli.project import add_unit, opened, print_json, settings_of
from max_build.compilers.mef import CODE, read_code
from max_build.outcomes import Outcome
from max_build.pipeline import build
from max_build.store import Cache

__all__ = ["register", "run"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "show",
        help="a unit's record: kernels, sizes, signatures",
        description="Show what the cache holds for a unit: its key, inputs, outputs and weights, "
        "and each kernel of its machine code with architecture, registers and sizes.",
        allow_abbrev=False,
    )
    add_unit(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show; 1 if any target of the unit is not in the cache."""
    settings = settings_of(options)
    with opened(settings.cache) as cache:
        result = build(settings, cache, mode="require-hit")
        shown = [_described(one, cache) for one in result.outcomes if one.record]
    if options.json:
        print_json(shown)
    else:
        for one in shown:
            print("\n".join(_lines(one)))
    for left in result.failed:
        why = left.error or f"not in the cache ({left.reason}); run `max-build build`"
        print(f"`{left.unit.name}` × `{left.target}`: {why}", file=sys.stderr)
    return 1 if result.failed else 0


def _described(outcome: Outcome, cache: Cache) -> dict[str, Any]:
    record = outcome.record
    assert record is not None, outcome
    blobs = []
    for blob in record.blobs:
        one: dict[str, Any] = {"role": blob.role, "digest": blob.digest, "size": blob.size}
        if blob.role in CODE:
            path = cache.path(blob)
            one["path"] = str(path)
            one["images"] = [
                msgspec.to_builtins(image, str_keys=True)
                for image in read_code(path.read_bytes(), blob.role)
            ]
        blobs.append(one)
    return {
        "unit": outcome.unit.name,
        "target": str(outcome.target),
        "key": record.key,
        "tier": outcome.tier,
        "components": msgspec.to_builtins(record.components),
        "seconds": record.seconds,
        "inputs": msgspec.to_builtins(record.inputs),
        "outputs": msgspec.to_builtins(record.outputs),
        "weights": msgspec.to_builtins(record.weights),
        "kernels": msgspec.to_builtins(record.kernels),
        "blobs": blobs,
    }


def _lines(one: dict[str, Any]) -> list[str]:
    lines = [
        f"{one['unit']} × {one['target']}",
        f"  key       {one['key']}",
        f"  compiled  in {one['seconds']:.1f} s by "
        + ", ".join(f"{name} {build}" for name, build in one["components"]["compiler"].items()),
    ]
    for name in ("inputs", "outputs"):
        for tensor in one[name]:
            lines.append(f"  {name[:-1]:8}  {_tensor(tensor)}")
    if one["weights"]:
        size = sum(_bytes(tensor) for tensor in one["weights"])
        lines.append(f"  weights   {len(one['weights'])} tensors, {size / 1e6:.1f} MB")
    lines.extend(
        f"  kernel    {source} → {kernel['lowered']}" for source, kernel in one["kernels"].items()
    )
    for blob in one["blobs"]:
        lines.append(f"  {blob['role']:8}  {blob['size'] / 1e3:.1f} kB  {blob['digest'][:16]}…")
        for image in blob.get("images", ()):
            if not image["kernels"]:
                lines.append(f"    {image['arch']:8}  {image['size'] / 1e3:8.1f} kB")
            for kernel in image["kernels"]:
                stack = "?" if kernel["stack_bytes"] is None else kernel["stack_bytes"]
                lines.append(
                    f"    {image['arch']:8}  {kernel['code_bytes'] / 1e3:8.1f} kB code, "
                    f"{kernel['registers']:3} registers, {kernel['shared_bytes']} B shared, "
                    f"{stack} B stack, {kernel['local_bytes']} B local, "
                    f"{sum(kernel['constants'].values())} B constants  {kernel['name']}"
                )
    return lines


def _tensor(tensor: dict[str, Any]) -> str:
    shape = ", ".join(str(dim) for dim in tensor["shape"])
    return f"{tensor['name']}: {tensor['dtype']}[{shape}] on {tensor['device']}"


def _bytes(tensor: dict[str, Any]) -> int:
    import math
    import re

    bits = re.search(r"\d+", tensor["dtype"].replace("bool", "8"))
    dims = [dim for dim in tensor["shape"] if isinstance(dim, int)]
    return math.prod(dims) * int(bits[0] if bits else 8) // 8
