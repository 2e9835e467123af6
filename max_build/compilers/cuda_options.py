"""The options of a CUDA C++ unit: checked, put into one canonical form, and told to NVRTC.

Two sets of options with one effect have one canonical form: what is unset and what is set to its
default are the same, an option that another one overrides is left out, and `1`, `"1"` and `true`
define a macro alike. The arguments are made from the same fields, so equal forms cannot compile
differently. Defaults and precedence follow "Supported Compile Options" of the NVRTC manual; that an
explicit `fmad`, `ftz`, `prec-div` or `prec-sqrt` wins over `use-fast-math` in any order was
measured with 13.0.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from max_build.compilers import ptxas_options
from max_build.compilers.scan import VOLATILE
from max_build.errors import ConfigError

__all__ = ["NAMES", "PTX_NAMES", "CudaOptions", "decode", "problems"]

NAMES: Final = (
    "debug", "defines", "extra", "fmad", "ftz", "lineinfo", "maxrregcount", "optimize", "prec-div",
    "prec-sqrt", "std", "use-fast-math",
)  # fmt: skip
"""Every option of a CUDA C++ unit."""

PTX_NAMES: Final = ("debug", "lineinfo", "maxrregcount")
"""The options of a PTX unit, which only the assembler is left to heed."""

_STANDARDS: Final = ("c++11", "c++14", "c++17", "c++20", "c++23")
_DEFAULT_STANDARD: Final = "c++17"
_LEVELS: Final = ("full", "fast-compile")
_MOST_REGISTERS: Final = 255
# Default, and what `use-fast-math` makes of it.
_MATH: Final = {
    "fmad": (True, True),
    "ftz": (False, True),
    "prec-div": (True, False),
    "prec-sqrt": (True, False),
}

_HEADERS: Final = (
    "headers are found by `include-dirs` and by `#include` alone, so that all are known"
)
_TARGET: Final = "the architecture is the unit's target"
_FILES: Final = "it reads or writes files beside the compile"
_NO_CUBIN: Final = "it leaves no cubin that could be loaded as it is"
_CACHE: Final = "NVRTC's own cache is always off"
_REFUSED: Final = {
    "I": _HEADERS, "include-path": _HEADERS, "isystem": _HEADERS, "include": _HEADERS,
    "pre-include": _HEADERS, "preinclude": _HEADERS, "no-source-include": _HEADERS,
    "use-bundled-headers": _HEADERS,
    "Xcudafe": "it may change which headers are read, unseen",
    "arch": _TARGET, "gpu-architecture": _TARGET,
    "time": _FILES, "fdevice-time-trace": _FILES, "device-time-trace": _FILES,
    "ftrace-phase-after": _FILES, "pch": _FILES, "create-pch": _FILES, "use-pch": _FILES,
    "pch-dir": _FILES, "pch-verbose": _FILES, "pch-messages": _FILES,
    "instantiate-templates-in-pch": _FILES,
    "dlto": _NO_CUBIN, "dlink-time-opt": _NO_CUBIN, "gen-opt-lto": _NO_CUBIN,
    "optix-ir": _NO_CUBIN, "fdevice-syntax-only": _NO_CUBIN, "rdc": _NO_CUBIN,
    "relocatable-device-code": _NO_CUBIN, "dc": _NO_CUBIN, "device-c": _NO_CUBIN,
    "ewp": _NO_CUBIN, "extensible-whole-program": _NO_CUBIN,
    "no-cache": _CACHE, "enable-cache-trace": _CACHE,
    "split-compile": "the code would depend on how many CPUs compile it",
    **{name: f"it is the option `{option}`" for option, names in {
        "std": ("std",), "defines": ("D", "define-macro"), "maxrregcount": ("maxrregcount",),
        "lineinfo": ("lineinfo", "generate-line-info"), "debug": ("G", "device-debug"),
        "fmad": ("fmad",), "ftz": ("ftz",), "prec-div": ("prec-div",),
        "prec-sqrt": ("prec-sqrt",), "use-fast-math": ("use-fast-math",),
        "optimize": ("Ofc", "Ofast-compile", "dopt"),
    }.items() for name in names},
}  # fmt: skip
_TAKES_VALUE: Final = ("Xptxas", "ptxas-options")


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Options with every default and every implication worked out.

    `math` holds what `fmad`, `ftz`, `prec-div` and `prec-sqrt` come to.
    """

    std: str = _DEFAULT_STANDARD
    defines: dict[str, str] = field(default_factory=dict)
    use_fast_math: bool = False
    math: dict[str, bool] = field(
        default_factory=lambda: {name: plain for name, (plain, _) in _MATH.items()}
    )
    maxrregcount: int = 0
    lineinfo: bool = False
    debug: bool = False
    fast_compile: bool = False
    extra: tuple[str, ...] = ()

    def canonical(self) -> dict[str, str]:
        """What differs from the defaults, for the key: equal effect, equal text."""
        found = {f"define {name}": value for name, value in sorted(self.defines.items())}
        if self.std != _DEFAULT_STANDARD:
            found["std"] = self.std
        if self.use_fast_math:
            found["use-fast-math"] = "true"
        for name, (plain, _) in _MATH.items():
            if self.math[name] != plain:
                found[name] = _word(self.math[name])
        if self.maxrregcount:
            found["maxrregcount"] = str(self.maxrregcount)
        if self.debug:
            found["debug"] = "true"
        elif self.lineinfo:
            found["lineinfo"] = "true"
        if self.fast_compile:
            found["optimize"] = "fast-compile"
        if self.extra:
            found["extra"] = "\n".join(self.extra)
        return found

    def arguments(self) -> tuple[str, ...]:
        """The arguments for NVRTC, without architecture and include directories."""
        return (
            f"--std={self.std}",
            *(f"--define-macro={name}={value}" for name, value in sorted(self.defines.items())),
            *(["--use_fast_math"] if self.use_fast_math else []),
            *(f"--{name}={_word(self.math[name])}" for name in _MATH),
            *([f"--maxrregcount={self.maxrregcount}"] if self.maxrregcount else []),
            *(["--device-debug"] if self.debug else []),
            *(["--generate-line-info"] if self.lineinfo and not self.debug else []),
            *(["-Ofc=max"] if self.fast_compile else []),
            *self.extra,
        )

    def linker_arguments(self) -> tuple[str, ...]:
        """The arguments for nvJitLink, of the options in `PTX_NAMES`."""
        return (
            *([f"-maxrregcount={self.maxrregcount}"] if self.maxrregcount else []),
            *(["-g"] if self.debug else []),
            *(["-lineinfo"] if self.lineinfo and not self.debug else []),
        )


_PLAIN: Final = CudaOptions()


def decode(options: Mapping[str, Any], names: Sequence[str] = NAMES) -> CudaOptions:
    """Decode a TOML table.

    Parameters
    ----------
    options
        The table.
    names
        The options there are: `NAMES` or `PTX_NAMES`.

    Raises
    ------
    ConfigError
        Some options are wrong; every one is listed.
    """
    if not options:
        return _PLAIN  # as most units, of which there may be thousands
    wrong = [f"`options.{name}` {reason}" for name, reason in problems(options, names)]
    if wrong:
        raise ConfigError("\n".join(wrong))
    fast = options.get("use-fast-math", False)
    return CudaOptions(
        std=options.get("std", _DEFAULT_STANDARD),
        defines={name: _value(value) for name, value in options.get("defines", {}).items()},
        use_fast_math=fast,
        math={name: options.get(name, values[fast]) for name, values in _MATH.items()},
        maxrregcount=options.get("maxrregcount", 0),
        lineinfo=options.get("lineinfo", False),
        debug=options.get("debug", False),
        fast_compile=options.get("optimize") == "fast-compile",
        extra=tuple(item.strip() for item in options.get("extra", ())),
    )


def problems(options: Mapping[str, Any], names: Sequence[str] = NAMES) -> Iterator[tuple[str, str]]:
    """Yield each thing that is wrong with a TOML table, as (key, "must be …")."""
    for name, value in options.items():
        if name not in names:
            near = difflib.get_close_matches(name.replace("_", "-"), names, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {_listed(names)}"
            yield name, f"is unknown; {hint}"
        elif name == "defines":
            yield from _define_problems(value)
        elif name == "extra":
            yield from _extra_problems(value)
        elif name == "std":
            if value not in _STANDARDS:
                yield name, f"must be one of {_listed(_STANDARDS)}, got {value!r}"
        elif name == "optimize":
            if value not in _LEVELS:
                yield name, f"must be one of {_listed(_LEVELS)}, got {value!r}"
            elif value == "fast-compile" and options.get("debug") is True:
                yield name, "has no effect together with `debug`"
        elif name == "maxrregcount":
            if type(value) is not int or not 1 <= value <= _MOST_REGISTERS:
                yield name, f"must be a whole number from 1 to {_MOST_REGISTERS}, got {value!r}"
        elif type(value) is not bool:
            yield name, f"must be a boolean, got {value!r}"


def _define_problems(defines: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(defines, Mapping):
        yield "defines", f"must be a table, got {defines!r}"
        return
    for name, value in defines.items():
        where = f"defines.{name}"
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield where, "must be named as a C++ identifier"
        if not isinstance(value, str | int | float):
            yield where, f"must be a string, a number or a boolean, got {value!r}"
            continue
        text = _value(value)
        if "\n" in text or "\r" in text or "\0" in text:
            yield where, "must be one line"
        volatile = VOLATILE.search(text.encode())
        if volatile:
            yield where, f"must not use `{volatile[0].decode()}`, which differs in every compile"
        if "has_include" in text.lower():
            yield where, "must not ask for headers, which are to be known before"
        if "##" in text or "%:%:" in text:
            yield where, "must not paste with `##`: what comes of it is not known before"


def _extra_problems(extra: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(extra, list | tuple) or not all(isinstance(item, str) for item in extra):
        yield "extra", f"must be an array of strings, got {extra!r}"
        return
    is_value = False
    for position, raw in enumerate(extra, 1):
        item = raw.strip()  # as NVRTC does
        where = f"extra item {position}"
        if not item or "\n" in item or "\0" in item:
            yield "extra", f"has an empty item or one of several lines at {position}"
        elif not is_value:
            name = _option(item)
            if name in _REFUSED:
                yield "extra", f"must not have `{item}`: {_REFUSED[name]} ({where})"
            for_ptxas = item.partition("=")[2] if name in _TAKES_VALUE and "=" in item else ""
            if for_ptxas and (why := ptxas_options.wrong(for_ptxas)):
                yield "extra", f"must not have `{item}`: {why} ({where})"
        elif why := ptxas_options.wrong(item):
            yield "extra", f"must not have `{item}`: {why} ({where})"
        is_value = not is_value and _option(item) in _TAKES_VALUE and "=" not in item


def _option(item: str) -> str:
    """The name of an option by itself: `-I/usr/include` is `I`, `--create_pch=x` `create-pch`."""
    bare = item.lstrip("-")
    if item == bare:
        return ""
    if item[:2] in ("-I", "-D") and not item.startswith("--"):
        return item[1]
    return bare.partition("=")[0].split()[0].replace("_", "-") if bare.strip("= ") else ""


def _value(value: str | float) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _word(value: bool) -> str:
    return "true" if value else "false"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
