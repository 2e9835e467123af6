"""Find what one CUDA C++ file may include, without preprocessing it.

The answer is a superset: conditions are ignored, so an include under `#if 0` counts. Hiding an
include that the compiler sees would be a stale hit one day, so the scan follows translation
phases 1 to 3 of C++11 and later (ISO C++ [lex.phases]) as NVRTC was measured to apply them, and
whatever it cannot follow becomes a problem, which makes the unit uncacheable:

- comments end nowhere but where they end, raw strings hide their lines even in a skipped group,
  an unmatched quote reaches to the end of its line, a backslash joins lines only when the line
  break follows at once;
- `#include` and `#include_next` of a literal name are followed, of a macro refused;
- `__has_include` counts as an include; a macro that wraps it is known by `has_include` in its
  name and refused under any other;
- trigraphs (they are on before C++17), `__TIME__`, `__DATE__` and `__TIMESTAMP__` are refused.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

import msgspec

__all__ = ["SCAN_VERSION", "VOLATILE", "Include", "Problem", "Scan", "scan"]

SCAN_VERSION: Final = 3
"""Part of the name under which a scan may be kept; goes up when `scan` sees something new."""

VOLATILE: Final = re.compile(rb"\b__(?:TIME|DATE|TIMESTAMP)__\b")
"""Macros whose value differs from one compile to the next."""


class Include(msgspec.Struct, frozen=True, array_like=True):
    """A literal include or `__has_include`.

    `quoted` looks beside the including file first; `following` is `#include_next`.
    """

    name: str
    quoted: bool
    following: bool = False


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """Why a file cannot be keyed: the reason, and its line (from 1, 0 for the whole file)."""

    line: int
    reason: str


class Scan(msgspec.Struct, frozen=True, array_like=True):
    """What one file may include, in order and without repeats, and what is wrong with it."""

    includes: tuple[Include, ...]
    problems: tuple[Problem, ...]


_NUMBER = rb"(?<![\w.])\.?\d(?:[eEpP][+-]|'\w|[\w.])*+"  # the quote in 1'000 begins no literal
_SPLICE = re.compile(rb"\\\r?\n")
_OPAQUE = re.compile(
    rb"""
      //[^\n]*
    | /\*.*?(?:\*/|\Z)
    | (?<!\w)(?:u8|[uUL])?R"(?P<delimiter>[^\s()\\"]{0,16})\(.*?(?:\)(?P=delimiter)"|\Z)
    | %b
    | "(?:[^"\\\n]|\\[^\n])*"?
    | '(?:[^'\\\n]|\\[^\n])*'?
    """
    % _NUMBER,
    re.VERBOSE | re.DOTALL,
)
_VOLATILE_OR_LITERAL = re.compile(
    rb"""
      (?P<volatile>%b)
    | %b
    | (?P<quote>["'])(?:(?!(?P=quote))[^\\\n]|\\[^\n])*+(?P<end>(?P=quote))?
    """
    % (VOLATILE.pattern, _NUMBER),
    re.VERBOSE,
)
_DIRECTIVE = re.compile(
    rb"^[ \t\v\f\r]*(?:\#|%:)[ \t\v\f]*"
    rb"(include_next|include|import|embed|elif|if|define)\b([^\n]*)",
    re.MULTILINE,
)
_NAME = re.compile(rb'[ \t\v\f]*(?:"([^"\n]+)"|<([^>\n]+)>)')
_PROBE = re.compile(rb"(?<!\w)\w*has_include\w*", re.IGNORECASE)
_PROBED = re.compile(rb'\w+[ \t\v\f]*\([ \t\v\f]*(?:"([^"\n]+)"|<([^>\n]+)>)[ \t\v\f]*\)')
_ARGUMENT = re.compile(rb"[ \t\v\f]*\(([^()]*)\)?")
_MACRO = re.compile(rb"[ \t\v\f]*(\w+)(?:\(([^)\n]*)\))?")
_DEFINED = re.compile(rb"\bdefined[ \t\v\f]*+\(?[ \t\v\f]*+\w+")
# A comment that a header name would swallow: too odd to follow.
_SLASHED_NAME = re.compile(
    rb"""
      (?:^|")[^\n"\#%]*+(?:%(?!:)[^\n"\#%]*+)*+(?:\#|%:)(?>[^\n"]*?include)
      (?:[^\n"<]*+<(?:[^>\n"/]|/(?![/*]))*+>)*+     # names that are closed
      [^\n"<]*+<[^>\n]*/[/*]
    """,
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)


def scan(data: bytes) -> Scan:
    """Scan the bytes of one source or header; of its problems only the first is told."""
    found: dict[Include, None] = {}
    problems: list[Problem] = []

    if b"??=" in data or b"??/" in data:
        problems.append(Problem(0, "has a trigraph"))
    if _SLASHED_NAME.search(data):
        problems.append(Problem(0, "has `//` or `/*` in the name of a header"))
    text, whole = _visible(data)
    if not whole:
        problems.append(Problem(0, "continues a line inside a raw string"))
    for directive in _DIRECTIVE.finditer(text):
        kind, rest = directive.groups()
        if kind in (b"include", b"include_next"):
            names = [_NAME.match(rest)]
        elif kind in (b"import", b"embed"):
            names = [None]
        else:
            names = list(_probes(kind, rest))
        for name in names:
            written = None if name is None else _utf8(name[1] or name[2])
            if written is None or name is None:
                if not problems:
                    reason = f"has a computed `{_shown(directive[0])}`"
                    problems.append(Problem(_line(data, directive.start()), reason))
            else:
                following = kind == b"include_next" or (
                    name.re is _PROBED and b"next" in name[0].partition(b"(")[0]
                )
                found[Include(written, name[1] is not None, following)] = None
    if not problems and (volatile := _volatile(text)):
        problems.append(Problem(_line(data, volatile.start()), f"uses `{volatile[0].decode()}`"))
    return Scan(tuple(found), tuple(problems))


def _volatile(text: bytes) -> re.Match[bytes] | None:
    """The first macro that differs from one compile to the next, outside of what is quoted."""
    if VOLATILE.search(text) is None:
        return None  # as in most files
    for token in _VOLATILE_OR_LITERAL.finditer(text):
        if token["volatile"]:
            return token
        # A quote without its partner may be none at all to a compiler: nothing hides behind it.
        half = token["quote"] and not token["end"]
        if half and (found := VOLATILE.search(text, token.start(), token.end())):
            return found
    return None


def _visible(data: bytes) -> tuple[bytes, bool]:
    """The text with lines joined, comments as one space and raw strings empty; whether it is so.

    It is not where a line is continued inside a raw string, since there it is not to be joined.
    """
    whole = True

    def replace(token: re.Match[bytes]) -> bytes:
        nonlocal whole
        if token[0].startswith(b"/"):
            return b" "
        if token["delimiter"] is None:
            return token[0]
        whole = whole and token[0] in data
        return b'""'

    # NVRTC refuses a byte order mark today; a version that skips it must not surprise us.
    joined = _SPLICE.sub(b"", data.removeprefix(b"\xef\xbb\xbf"))
    return _OPAQUE.sub(replace, joined), whole


def _probes(kind: bytes, rest: bytes) -> Iterator[re.Match[bytes] | None]:
    """Yield the literal names that a condition or a macro asks `__has_include` for.

    None stands for a name that is computed. In a macro that says `has_include` in its own name
    the parameter may stand for it: each use of the macro is looked at for itself.
    """
    if b"include" not in rest.lower():
        return
    parameter = b""
    wrapper = False
    if kind == b"define":
        head = _MACRO.match(rest)
        if head is None:
            return
        wrapper = _PROBE.fullmatch(head[1]) is not None
        parameter = (head[2] or b"").strip()
        rest = rest[head.end() :]
    rest = _DEFINED.sub(b"", rest)
    for probe in _PROBE.finditer(rest):
        literal = _PROBED.match(rest, probe.start())
        if literal is not None:
            yield literal
            continue
        argument = _ARGUMENT.match(rest, probe.end())
        if argument is None:
            # Not called here: a plain macro with such a name, or an alias for the operator.
            computed = kind == b"define" and not wrapper
        else:
            computed = not wrapper or argument[1].strip() != parameter
        if computed:
            yield None


def _line(data: bytes, at: int) -> int:
    """The line of the file, from 1, that `at` of the visible text came from."""
    lines = io.BytesIO(data).readlines()  # which end at `\n` alone
    return bisect_left(
        range(len(lines)), at + 1, key=lambda count: len(_visible(b"".join(lines[:count]))[0])
    )


def _utf8(name: bytes) -> str | None:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def _shown(directive: bytes) -> str:
    text = " ".join(directive.decode("utf-8", "backslashreplace").split())
    return text if len(text) <= 80 else f"{text[:77]}..."
