"""Sources of kernels: which headers they may reach, whatever they look like."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from harness import Target, scratch

from max_build.compilers.cuda_libraries import NVRTC
from max_build.compilers.files import Disk
from max_build.compilers.includes import Closure, Layout, changed, resolve
from max_build.compilers.scan import scan
from max_build.errors import CompileError, ToolchainError

__all__ = ["GCC", "TARGETS"]

GCC = shutil.which("gcc")
_HEADERS = {
    "a.h": b"#pragma once\n#include <b.h>\n",
    "inc/b.h": b"int b;\n",
    "inc/s/c.h": b'#include "../b.h"\n',
    "s/d.h": b'#include_next <d.h>\n#include "../a.h"\n',
    "inc/d.h": b"",
}
_SOURCE = rb"""// A kernel's source with some of everything.
#include "a.h"
#  include /* which? */ <s/c.h>
#if defined(X) && __has_include("s/d.h")
%:include "s/d.h"
#elif __has_include(<none.h>)
#endif
#define HAVE(x) 1
#define MY_HAS_INCLUDE(x) __has_include(x)
const char *text = R"x(
#include "a.h"
)x" "/*" 'c' "\"";
auto n = 1'000'000; /* over
lines */ #inc\
lude "a.h"
__global__ void k(int *x) { *x = __LINE__; } // __TIME__
"""
# A number takes the letters that follow it: no raw string begins here.
_NUMBER = b'#if 0\n1.R"(\n#endif\n#include "a.h"\n//)"\n'

# What GCC 12 reads otherwise than NVRTC 13.0 does, which was asked: a raw string that begins in a
# directive ends with its line, blanks may stand between a backslash and the line's end, and a null
# byte is one (to NVRTC it is an error, but in a comment).
_OTHERWISE = re.compile(rb'R"|\0|\\[ \t\v\f\r]+(?:\n|\Z)')


@functools.cache
def _project() -> Path:
    root = scratch("includes")
    for name, text in _HEADERS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    return root


def _closure(data: bytes) -> Closure | None:
    root = _project()
    (root / "k.cu").write_bytes(data)
    layout = Layout.of(str(root), ("inc",))
    try:
        found = resolve(str(root / "k.cu"), layout, Disk())
    except CompileError:
        return None
    assert changed(found, layout, Disk()) == ""
    return found


def _includes(data: bytes) -> bool:
    found = scan(data)
    assert scan(data) == found
    for problem in found.problems:
        assert 0 <= problem.line <= data.count(b"\n") + 1
    # One more comment, one more line: nothing that was included is hidden by it.
    assert scan(b"/**/\n" + data.removeprefix(b"\xef\xbb\xbf")).includes == found.includes
    closure = _closure(data)
    assert closure is not None
    assert closure.files[0].path == "src/k.cu"
    assert {header.path.removeprefix("src/") for header in closure.files[1:]} <= {
        *_HEADERS,
        "k.cu",
    }
    return not closure.problems


def _preprocessor(data: bytes) -> bool:
    """GCC opens nothing that is not in the closure."""
    closure = _closure(data)
    if GCC is None or closure is None or closure.problems or _OTHERWISE.search(data):
        return False
    root = _project()
    command = [GCC, "-E", "-H", "-w", "-x", "c++", "-std=c++20", "-nostdinc", "-Iinc", "k.cu"]
    done = subprocess.run(
        command, cwd=root, capture_output=True, check=False, timeout=10, env={"LC_ALL": "C"}
    )
    opened = {
        os.path.normpath(line.lstrip(b".")[1:].decode())
        for line in done.stderr.splitlines()
        if line.startswith(b".") and b" " in line
    }
    known = {header.path.removeprefix("src/") for header in closure.files}
    missing = opened - known
    assert not missing, (missing, known)
    return True


def _nvrtc(data: bytes) -> bool:
    """NVRTC never reaches an `#include` that follows where the scan sees none.

    The text is put into a group that is skipped too, where NVRTC reads literals less well.
    """
    from cuda.bindings import nvrtc

    folder = scratch("nvrtc")
    (folder / "seen.h").write_text("#error SEEN\n")
    include = f'#include "{folder}/seen.h"\n'.encode()
    data = data.replace(b"\0", b" ")
    end = b'//)" )x" */ \'\n#error END\n'
    followed = True
    for source in (data + b"\n" + include + end, b"#if 0\n" + data + b"\n#endif\n" + include + end):
        found = scan(source)
        if found.problems or any(one.name.endswith("/seen.h") for one in found.includes):
            followed = False
            continue
        for std in (b"-std=c++11", b"-std=c++17"):
            _, program = nvrtc.nvrtcCreateProgram(source, b"k.cu", 0, [], [])
            nvrtc.nvrtcCompileProgram(program, 3, [b"-arch=compute_90", b"-w", std])
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = bytes(size + 2)
            nvrtc.nvrtcGetProgramLog(program, log)
            nvrtc.nvrtcDestroyProgram(program)
            assert b"SEEN" not in log, (std, source)
    return followed


def _literals() -> Mapping[str, bytes]:
    return {
        "bad-suffix": b'"a"R"(',
        "bad-character": b"L'a'R\"(",
        "bad-escape": b'\\uR"(',
        "bad-exponent": b'c.1e+R"(',
        "bad-separator": b"1'0/*",
        "bad-number": b"1f''/*",
        "bad-directive": b"#1'0/*",
        "bad-name": b'__has_include(<R"(',
    }


def _has_nvrtc() -> bool:
    try:
        NVRTC.load()
    except ToolchainError:
        return False
    return True


def _line_by_line(data: bytes) -> bool:
    """Only that it ends: no text takes time by the square of its length."""
    return not scan(data).problems


def _seeds() -> Mapping[str, bytes]:
    return {"good-source": _SOURCE, "good-empty": b"", "good-number": _NUMBER}


def _plain() -> Mapping[str, bytes]:
    return {"good-source": _SOURCE.replace(b'R"', b'"'), "good-empty": b""}


def _long() -> Mapping[str, bytes]:
    return {
        "good-backslashes": b"\\\n" * 4000,
        "good-quotes": b"'" * 4000 + b'\n"' * 2000,
        "good-numbers": b"1'" * 8000 + b"1",
        "good-raw": b'R"(' * 4000,
        "good-comments": b"/*" * 4000,
        "bad-directives": b"#" * 4000 + b"\n#include\t" * 10 + b'"a.h"',
        "good-letters": b"u8" * 8000 + b"_" * 8000,
        "bad-probes": b"#if " + b"__has_include(" * 2000,
        "bad-literals": b"#if " + b'__has_include("' * 4000,
        "bad-hashes": b"# " * 15_000 + b"\n#include",
        "good-exponents": b"1e+" * 8000,
        "good-words": b"#if " + b"a" * 30_000 + b"include",
        "good-times": b'"__TIME__" ' * 5000,
        "good-defined": b"#if include defined" + b" " * 30_000,
        "good-names": b'#include "' * 3000,
        "good-spaces": b"#if __has_include" + b" \t" * 8000,
    }


_TOKENS = (
    b'#include "a.h"\n', b"#include <s/c.h>\n", b"#include_next <d.h>\n", b"/*", b"*/", b"//",
    b"\\\n", b"\\\r\n", b'R"(', b')"', b'R"x(', b')x"', b'"', b"'", b"#if 0\n", b"#endif\n",
    b"%:", b"??/", b"__has_include(<b.h>)", b"#define F(x) ", b"u8", b"1'0", b"\f", b"\v", b"\r",
    b"\0", b"\xef\xbb\xbf", b"#define A_HAS_INCLUDE(x) __has_include(x)\n", b"__TIME__", b"defined",
)  # fmt: skip

TARGETS = (
    Target("includes", _includes, _seeds, tokens=_TOKENS, weight=2),
    Target("long-lines", _line_by_line, _long, tokens=_TOKENS, weight=6),
    *([Target("nvrtc", _nvrtc, _literals, tokens=_TOKENS, weight=20)] if _has_nvrtc() else []),
    *([Target("preprocessor", _preprocessor, _plain, tokens=_TOKENS, weight=20)] if GCC else []),
)
