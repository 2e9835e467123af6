"""The declaration of a Triton unit: what may stand in its table, and its specialisations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from max_build.compilers import ptxas_options

if TYPE_CHECKING:
    from max_build.config import Unit

__all__ = ["Special", "problems", "specials"]

_TYPE = re.compile(
    r"(\*k?)?(i1|i8|i16|i32|i64|u1|u8|u16|u32|u64|fp16|bf16|fp32|fp64"
    r"|fp8e4nv|fp8e4b8|fp8e4b15|fp8e5|fp8e5b16)(:16)?"
)
# Key of `options` → field of Triton's own options, and the type it has in TOML.
_OPTIONS: Mapping[str, tuple[str, type]] = {
    "debug": ("debug", bool),
    "default-dot-input-precision": ("default_dot_input_precision", str),
    "enable-fp-fusion": ("enable_fp_fusion", bool),
    "enable-reflect-ftz": ("enable_reflect_ftz", bool),
    "launch-cooperative-grid": ("launch_cooperative_grid", bool),
    "lineinfo": ("", bool),
    "maxnreg": ("maxnreg", int),
    "num-ctas": ("num_ctas", int),
    "ptx-options": ("ptx_options", str),
    "ptx-version": ("ptx_version", int),
    "sanitize-overflow": ("sanitize_overflow", bool),
}
_SPECIAL = ("constexprs", "num-stages", "num-warps", "options", "signature")


@dataclass(frozen=True, slots=True)
class Special:
    """One specialisation as declared; `signature` and `constexprs` cover every argument."""

    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any]
    lineinfo: bool


def problems(unit: Unit) -> Iterator[tuple[str, str]]:
    """Everything that is wrong with a unit's table, as (key, "must be …")."""
    declared = unit.declared
    if not declared["entry"]:
        yield "entry", "must be `package.module:kernel`; a Triton kernel has no `source`"
    for name in ("names", "include-dirs", "keep-ptx"):
        if declared[name]:
            yield name, "is not for a Triton kernel"
    yield from _problems("", declared)
    for name, table in declared["specialisations"].items():
        if not isinstance(table, dict):
            yield f"specialisations.{name}", f"must be a table, got {table!r}"
            continue
        for key in sorted(table.keys() - set(_SPECIAL)):
            known = ", ".join(f"`{one}`" for one in _SPECIAL)
            yield f"specialisations.{name}.{key}", f"is unknown: there are {known}"
        wrong = [
            key
            for key in ("constexprs", "options", "signature")
            if not isinstance(table.get(key, {}), dict)
        ]
        for key in wrong:
            yield f"specialisations.{name}.{key}", "must be a table"
        if not wrong:
            yield from _problems(f"specialisations.{name}.", table)


def _problems(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for argument, text in table.get("signature", {}).items():
        if not isinstance(text, str) or not _TYPE.fullmatch(text):
            yield (
                f"{prefix}signature.{argument}",
                f'must be a type such as "i32", "fp32", "*fp32" or "*fp32:16", got {text!r}',
            )
    for argument, value in table.get("constexprs", {}).items():
        if not isinstance(value, bool | int | float | str):
            yield f"{prefix}constexprs.{argument}", "must be a boolean, a number or a string"
    for name, value in table.get("options", {}).items():
        if name not in _OPTIONS:
            known = ", ".join(f"`{one}`" for one in _OPTIONS)
            yield f"{prefix}options.{name}", f"is unknown: there are {known}"
        elif type(value) is not _OPTIONS[name][1]:
            yield f"{prefix}options.{name}", f"must be of type {_OPTIONS[name][1].__name__}"
        elif name == "ptx-options":
            for item in str(value).split():
                if why := ptxas_options.wrong(item):
                    yield f"{prefix}options.{name}", f"must not have `{item}`: {why}"
    if "num-warps" in table:
        warps = table["num-warps"]
        if type(warps) is not int or not 1 <= warps <= 32 or warps & (warps - 1):
            yield f"{prefix}num-warps", f"must be a power of 2 from 1 to 32, got {warps!r}"
    if "num-stages" in table:
        stages = table["num-stages"]
        if type(stages) is not int or stages < 1:
            yield f"{prefix}num-stages", f"must be a whole number of at least 1, got {stages!r}"


def specials(unit: Unit) -> dict[str, Special]:
    """The specialisations of a unit by name: one, named after the unit, where it declares none."""
    declared = unit.declared
    tables: dict[str, Any] = declared["specialisations"] or {unit.name: {}}
    found: dict[str, Special] = {}
    for name, table in tables.items():
        merged = {
            key: {**declared[key], **table.get(key, {})}
            for key in ("constexprs", "options", "signature")
        }
        options = {
            _OPTIONS[key][0]: value for key, value in merged["options"].items() if _OPTIONS[key][0]
        }
        found[name] = Special(
            # What is made constant in one specialisation has a type in another.
            signature={
                argument: text
                for argument, text in merged["signature"].items()
                if argument not in table.get("constexprs", {})
            },
            constexprs={
                argument: value
                for argument, value in merged["constexprs"].items()
                if argument not in table.get("signature", {})
            },
            options={
                "num_warps": table.get("num-warps", declared["num-warps"]),
                "num_stages": table.get("num-stages", declared["num-stages"]),
                **options,
            },
            lineinfo=merged["options"].get("lineinfo", False),
        )
    return found
