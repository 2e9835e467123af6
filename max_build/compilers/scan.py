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
- trigraphs (they are on before C++17), `__TIME__`, `__DATE__` and `__TIMESTAMP__` are refused,
  and so is what could be pasted to one of these names or to `__has_include` (see `glued`);
- where NVRTC may end a literal elsewhere, as it does in a skipped group, both readings have to
  come to the same lines.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import msgspec

__all__ = ["SCAN_VERSION", "VOLATILE", "Include", "Problem", "Scan", "glued", "pieces", "scan"]

SCAN_VERSION: Final = 4
"""Part of the name under which a scan may be kept; goes up when `scan` sees something new."""

VOLATILE: Final = re.compile(rb"\b__(?:TIME|DATE|TIMESTAMP)__\b")
"""Macros whose value differs from one compile to the next."""


def _parts(name: str) -> set[str]:
    """Every proper part of a name, in one piece."""
    ends = range(1, len(name) + 1)
    return {name[start:end] for end in ends for start in range(end)} - {name}


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
    """What one file may include, in order and without repeats, and what is wrong with it.

    `pieces` is what it has for `glued`.
    """

    includes: tuple[Include, ...]
    problems: tuple[Problem, ...]
    pieces: tuple[str, ...] = ()


_NUMBER = rb"(?:\.\d|(?<!\w)\d)(?:[eEpP][+-]|'\w|[\w.])*+"  # the quote in 1'000 begins no literal
_SPLICE = re.compile(rb"\\\r?\n")
_TOKENS = rb"""
      //[^\n]*
    | /\*.*?(?:\*/|\Z)
    # To one compiler a raw string or a character, to another the rest of a literal or a number.
    | (?P<doubtful>(?:(?<=["'$.\\}\x80-\xff])|(?<=[eEpP][+-]))(?:u8|[uUL])?R(?=")
        | %b(?:(?=[$\\\x80-\xff])|'))
    | (?<!\w)(?:u8|[uUL])?R"(?P<delimiter>[^\s()\\"]{0,16})\(.*?(?:\)(?P=delimiter)"|\Z)
    | (?P<number>%b)
    | "(?:[^"\\\n]|\\[^\n])*"?
    | '(?:[^'\\\n]|\\[^\n])*'?
    """
_OPAQUE = re.compile(_TOKENS % (_NUMBER, _NUMBER), re.VERBOSE | re.DOTALL)
# To C++11, and to NVRTC in a group that it skips, a quote inside a number begins a character.
_UNSEPARATED = re.compile(
    _TOKENS % (_NUMBER, _NUMBER.replace(rb"|'\w", b"")),
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
# As the pieces of `glued` end: `std::includes` is none.
_WRAPPER = re.compile(rb"\w*has_include(?:[_\d]\w*)?", re.IGNORECASE)
_PROBED = re.compile(rb'\w+[ \t\v\f]*\([ \t\v\f]*(?:"([^"\n]+)"|<([^>\n]+)>)[ \t\v\f]*\)')
_ARGUMENT = re.compile(rb"[ \t\v\f]*\(([^()]*)\)?")
_MACRO = re.compile(rb"[ \t\v\f]*(\w+)(?:\(([^)\n]*)\))?")
_DEFINED = re.compile(rb"\bdefined[ \t\v\f]*+\(?[ \t\v\f]*+\w+")
# What makes a call of a name that is not called here: another macro, or pasting.
_FOLLOWED = re.compile(rb"[ \t\v\f]*(?:\w|,|\#\#|%:%:)")
_PARENTHESIS = re.compile(rb"\w[ \t\v\f]*\(|[()]")
_PASTE = re.compile(rb"\#\#|%:%:")
# What no macro takes a piece from: names of headers, messages, literals.
_NO_PIECES = re.compile(
    rb"""
      ^[ \t\v\f\r]*(?:\#|%%:)[ \t\v\f]*
      (?:include(?:_next)?\b(?:[ \t\v\f]*(?:"[^"\n]*"|<[^>\n]*>))?|(?:error|warning)\b[^\n]*)
    | "(?:[^"\\\n]|\\[^\n])*+"
    | '(?:[^'\\\n]|\\[^\n])*+'
    | (?P<kept>%b|"(?:[^"\\\n]|\\[^\n])*+|'(?:[^'\\\n]|\\[^\n])*+)
    """
    % _NUMBER,
    re.VERBOSE | re.MULTILINE,
)
_CLOCKS = ("__TIME__", "__DATE__", "__TIMESTAMP__")
# Each kind of piece, and where to look for it.
_PIECES = {
    "=": re.compile(rb"(?<!\w)[_ADEIMPST]{1,12}(?!\w)"),
    "~": re.compile(rb"(?<!\w)[_acdehilnsu]{1,9}(?!\w)", re.IGNORECASE),
    ">": re.compile(rb"ha?s?_?i?n?c?l?u?d?(?!\w)", re.IGNORECASE),
    "<": re.compile(rb"(?<!\w)a?s?_?i?n?c?l?u?d?e(?![A-Za-z])", re.IGNORECASE),
}
_MARKED = {
    "##",
    *(f"={part}" for name in _CLOCKS for part in _parts(name)),
    *(f"{mark}{part}" for mark in "~<>" for part in _parts("has_include")),
}
# What begins no literal or comment to a compiler that reads a name here, even outside directives.
_ODD_NAME = re.compile(
    rb"""include\w*+[ \t\v\f]*+\(?[ \t\v\f]*+
    (?:<(?:[^<>\n"'/]|/(?![/*]))*+(?:["'<]|/[/*]) | "[^"\\\n]*+\\)""",
    re.VERBOSE | re.IGNORECASE,
)
_TWO_ENDS = "has a literal or a number that may end in two places"
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
    seen = _visible(data)
    texts = [seen.text]
    if not problems and (_ODD_NAME.search(seen.joined) or _ODD_NAME.search(seen.text)):
        problems.append(Problem(0, "has a quote or a backslash in the name of a header"))
    if seen.separated:
        other = _visible(data, _UNSEPARATED)
        texts.append(other.text)
        if other.spans != seen.spans:
            seen = seen._replace(doubt=_TWO_ENDS)
    if seen.doubt:
        problems.append(Problem(0, seen.doubt))
    known: set[bytes] = set()
    for text in texts:
        for directive in _DIRECTIVE.finditer(text):
            if text is not seen.text and directive[0] in known:
                continue
            known.add(directive[0])
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
            reason = f"uses `{volatile[0].decode()}`"
            problems.append(Problem(_line(data, volatile.start()), reason))
    return Scan(tuple(found), tuple(problems), tuple(sorted(set().union(*map(pieces, texts)))))


def pieces(text: bytes) -> set[str]:
    """What a text without comments has that `##` could make a name of; see `glued`.

    Each is marked by what it is: `##` itself, `=` a part of a name that tells the time; `>`, `~`
    and `<` the end, the whole and the beginning of a word, as parts of `has_include`.
    """
    text = _NO_PIECES.sub(lambda token: token["kept"] or b" ", text)
    found = {"##"} if _PASTE.search(text) else set()
    for mark, pattern in _PIECES.items():
        words = {one.decode() for one in set(pattern.findall(text))}
        found |= {mark + (one if mark == "=" else one.lower()) for one in words}
    return found & _MARKED


def glued(found: Collection[str]) -> str:
    """The name that the pieces of all files together could be pasted to, or nothing.

    A header may hold the `##`, another one a half of the name. Of more than three pieces with
    letters in them nobody makes a name: single letters are in all larger sources.
    """
    if "##" not in found:
        return ""
    of = {mark: {one[1:] for one in found if one[0] == mark} for mark in _PIECES}
    if _made("has_include", of[">"], of["~"], of["<"]):
        return "__has_include"
    return next((one for one in _CLOCKS if _made(one, of["="], of["="], of["="])), "")


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


class _Text(NamedTuple):
    """A text with lines joined, comments as one space and raw strings empty; and `joined` alone.

    `doubt` says why another compiler may see another one; `separated` is whether a number has a
    quote in it; `spans` are the places of the comments and raw strings that go over lines.
    """

    text: bytes
    joined: bytes
    doubt: str
    separated: bool
    spans: tuple[tuple[int, int], ...]


def _visible(data: bytes, grammar: re.Pattern[bytes] = _OPAQUE) -> _Text:
    doubt = ""
    separated = False
    spans: list[tuple[int, int]] = []

    def replace(token: re.Match[bytes]) -> bytes:
        nonlocal doubt, separated
        text = token[0]
        raw = token["delimiter"] is not None
        if token["doubtful"] is not None:
            doubt = doubt or _TWO_ENDS
        separated = separated or (token["number"] is not None and b"'" in text)
        if not raw and not text.startswith(b"/"):
            return text
        if b"\n" in text:
            spans.append(token.span())
        if not raw:
            return b" "
        if text not in data:  # a line is continued in it, where it is not to be joined
            doubt = doubt or "continues a line inside a raw string"
        return b'""'

    # NVRTC refuses a byte order mark today; a version that skips it must not surprise us.
    joined = _SPLICE.sub(b"", data.removeprefix(b"\xef\xbb\xbf"))
    text = grammar.sub(replace, joined)
    return _Text(text, joined, doubt, separated, tuple(spans))


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
        wrapper = _WRAPPER.fullmatch(head[1]) is not None
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
            computed = (kind == b"define" and not wrapper) or _handed_on(rest, probe)
        else:
            computed = not wrapper or argument[1].strip() != parameter
        if computed:
            yield None


def _handed_on(rest: bytes, probe: re.Match[bytes]) -> bool:
    """Whether a macro may make a call, or another name, of a name that is not called."""
    if _FOLLOWED.match(rest, probe.end()):
        return True
    open_calls: list[bool] = []
    for one in _PARENTHESIS.finditer(rest, 0, probe.start()):
        if one[0].endswith(b"("):
            open_calls.append(one[0] != b"(")
        elif open_calls:
            open_calls.pop()
    return any(open_calls)


def _made(
    name: str, starts: Collection[str], middles: Collection[str], ends: Collection[str]
) -> bool:
    """Whether a name is two or more of the pieces, of which at most three have letters."""

    def rest(at: int, left: int) -> bool:
        for one in {*middles, *ends} if at else starts:
            stop, enough = at + len(one), left - bool(one.strip("_"))
            if enough < 0 or not name.startswith(one, at):
                continue
            if (at and one in ends) if stop == len(name) else rest(stop, enough):
                return True
        return False

    return rest(0, 3)


def _line(data: bytes, at: int) -> int:
    """The line of the file, from 1, that `at` of the visible text came from."""
    lines = io.BytesIO(data).readlines()  # which end at `\n` alone
    return bisect_left(
        range(len(lines)), at + 1, key=lambda count: len(_visible(b"".join(lines[:count])).text)
    )


def _utf8(name: bytes) -> str | None:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def _shown(directive: bytes) -> str:
    text = " ".join(directive.decode("utf-8", "backslashreplace").split())
    return text if len(text) <= 80 else f"{text[:77]}..."
