"""Every fuzz target, and the inputs kept for it in `tests/data/fuzz/`."""

from __future__ import annotations

from pathlib import Path

import fuzz_config
import fuzz_elf
import fuzz_http
import fuzz_includes
import fuzz_records
import fuzz_store
import fuzz_weights
from harness import Target

__all__ = ["CORPUS", "TARGETS", "inputs"]

CORPUS = Path(__file__).resolve().parents[1] / "data" / "fuzz"

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (
        fuzz_config,
        fuzz_elf,
        fuzz_http,
        fuzz_includes,
        fuzz_records,
        fuzz_store,
        fuzz_weights,
    )
    for target in module.TARGETS
}


def inputs(target: Target) -> dict[str, bytes]:
    """The inputs to start from: those that the target makes, and those kept, by name."""
    kept = {path.name: path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))}
    return {**target.seeds(), **kept}
