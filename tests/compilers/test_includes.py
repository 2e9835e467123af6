"""The closure of includes: the rules one by one, each held against what NVRTC itself does."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max_build.compilers.cuda_libraries import NVRTC
from max_build.compilers.files import Disk, Found
from max_build.compilers.includes import Closure, Layout, changed, resolve
from max_build.compilers.nvrtc import compile_cubin
from max_build.compilers.scan import scan
from max_build.errors import CompileError, ToolchainError
from max_build.key import digest


class Memory:
    """A filesystem in a dictionary, with no links."""

    def __init__(self, files: dict[str, str | bytes]) -> None:
        self.files = {
            path: text if isinstance(text, bytes) else text.encode() for path, text in files.items()
        }

    def find(self, path: str) -> Found | None:
        path = os.path.normpath(path)
        data = self.files.get(path)
        return None if data is None else Found(path, digest(data))

    def read(self, path: str) -> bytes:
        return self.files[os.path.normpath(path)]


def closure_of(
    files: dict[str, str | bytes], include_dirs: tuple[str, ...] = (), source: str = "/p/k.cu"
) -> Closure:
    layout = Layout.of("/p", include_dirs)
    return resolve(source, layout, Memory(files))


def paths(closure: Closure) -> list[str]:
    return [header.path for header in closure.files]


def test_a_lone_source_is_its_own_closure() -> None:
    closure = closure_of({"/p/k.cu": "__global__ void k() {}"})
    assert paths(closure) == ["src/k.cu"]
    assert closure.absent == closure.problems == closure.include_dirs == ()


def test_a_quoted_name_is_looked_for_beside_the_file_that_names_it_then_in_order() -> None:
    files = {
        "/p/src/k.cu": '#include "a.h"\n',
        "/p/one/a.h": '#include "b.h"\n',
        "/p/two/a.h": "",
        "/p/one/b.h": "",
        "/p/two/b.h": "",
    }
    closure = closure_of(files, ("zero", "one", "two"), "/p/src/k.cu")
    assert paths(closure) == ["src/src/k.cu", "src/one/a.h", "src/one/b.h"]
    assert closure.absent == ("src/src/a.h", "src/zero/a.h")


def test_an_angled_name_is_looked_for_in_the_include_directories_alone() -> None:
    files = {"/p/k.cu": "#include <a.h>\n", "/p/a.h": "", "/p/inc/a.h": ""}
    assert paths(closure_of(files, ("inc",))) == ["src/k.cu", "src/inc/a.h"]
    assert paths(closure_of(files)) == ["src/k.cu"]


def test_conditions_are_ignored() -> None:
    files = {
        "/p/k.cu": '#if 0\n#include "a.h"\n#else\n#include "b.h"\n#endif\n',
        "/p/a.h": "",
        "/p/b.h": "",
    }
    assert paths(closure_of(files)) == ["src/k.cu", "src/a.h", "src/b.h"]


def test_include_next_reaches_every_candidate() -> None:
    files = {
        "/p/k.cu": "#include <a.h>\n",
        "/p/one/a.h": "#include_next <a.h>\n",
        "/p/two/a.h": "#include_next <a.h>\n",
        "/p/three/a.h": "",
    }
    closure = closure_of(files, ("one", "two", "three"))
    assert paths(closure) == ["src/k.cu", "src/one/a.h", "src/two/a.h", "src/three/a.h"]


def test_directories_outside_the_project_have_roots_of_their_own() -> None:
    layout = Layout.of("/p", ("inc", "/sdk/include", "/sdk/include/cccl", "/other", "/p"))
    assert layout.roots == {"src": "/p", "include-0": "/sdk/include", "include-1": "/other"}
    assert layout.include_dirs == ("src/inc", "include-0", "include-0/cccl", "include-1", "src")
    assert layout.disk_path("include-0/cccl/a.h") == "/sdk/include/cccl/a.h"
    assert layout.disk_path("src") == "/p"
    with pytest.raises(CompileError, match="lies outside of the project"):
        layout.tree_path("/elsewhere/k.cu")


def test_the_closure_is_the_same_wherever_the_project_lies() -> None:
    files = {"k.cu": '#include "a/b.h"\n#include <c.h>\n', "a/b.h": '#include "d.h"', "inc/c.h": ""}
    closures = [
        resolve(
            f"{root}/k.cu",
            Layout.of(root, ("inc", f"{sdk}/include")),
            Memory({f"{root}/{name}": text for name, text in files.items()}),
        )
        for root, sdk in (("/home/one/project", "/usr/sdk"), ("/ci/42", "/venv/lib/sdk"))
    ]
    assert closures[0] == closures[1]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('#include "a.h"', ["a.h"]),
        ('  #  include\t"a.h" // why', ["a.h"]),
        ('#/* x */include/* y */"a.h"', ["a.h"]),
        ('#inc\\\nlude \\\n"a.h"', ["a.h"]),
        ('#include "a\\\n.h"', ["a.h"]),
        ('#include \\\r\n"a.h"\r\n', ["a.h"]),
        ('%:include "a.h"', ["a.h"]),
        ('/*\n*/ #include "a.h"', ["a.h"]),
        ('#include /* over\nlines */ "a.h"', ["a.h"]),
        ('\ufeff#include "a.h"', ["a.h"]),
        ('int x = 1\'000; /* \' */\n#include "a.h"', ["a.h"]),
        ('auto c = \'"\';\n#include "a.h"\nauto d = \'"\';', ["a.h"]),
        ("auto c = u8'\"'; /*\n#include \"a.h\"\n*/", []),
        ("#if 0\ndon't /* stop\n#endif\n#include \"a.h\"\n//*/", ["a.h"]),
        ('#error don\'t\n#include "a.h"', ["a.h"]),
        ('auto s = "/*";\n#include "a.h"\nauto t = "*/";', ["a.h"]),
        ('auto s = "\\"/*";\n#include "a.h"', ["a.h"]),
        ('/*\n#include "a.h"\n*/', []),
        ('// \\\n#include "a.h"', []),
        ('auto s = R"(\n#include "a.h"\n)";', []),
        ('auto s = u8R"x(\n#include "a.h"\n)y" )x";', []),
        ('#if 0\nFOOR"(\n#endif\n#include "a.h"\n//)"', ["a.h"]),
        ('#if 0\n0R"(\n#endif\n#include "a.h"\n//)"', ["a.h"]),
        ('#if 0\n1.R"(\n#endif\n#include "a.h"\n//)"', ["a.h"]),
        ('c.1e+R"(\n#include "a.h"\n//)"', ["a.h"]),
        ('#if 0\n1e+R"(\n#endif\n#include "a.h"\n//)"', ["a.h"]),
        ('#include "a.h"\n#include "a.h"\n#include <a.h>', ["a.h", "a.h"]),
        ("#include <cuda/std/atomic>", ["cuda/std/atomic"]),
        ('#define X "a.h"', []),
        ('#if __has_include("a.h")', ["a.h"]),
        ("#if defined(X) && !__has_include( <a.h> ) || Y", ["a.h"]),
        ("#elif __has_include(<a.h>) && __has_include(<b.h>)", ["a.h", "b.h"]),
        ("#ifdef __has_include", []),
        ("#if defined __has_include", []),
        ("#define MY_HAS_INCLUDE(x) __has_include(x)\n#if MY_HAS_INCLUDE(<a.h>)", ["a.h"]),
        ("#define MY_HAS_INCLUDE(x) 0", []),
        ("#define HAS_A_INCLUDE_GUARD", []),
        ("#define HAVE_A __has_include(<a.h>)", ["a.h"]),
        ("// __TIME__ and /* __DATE__ */", []),
        ('auto s = "__TIME__";', []),
        ("auto s = \"it's __TIME__ \\\" 'then'\"; char q = '\"';", []),
        ("int my__TIME__s;", []),
        ('#pragma once\n#line 3 "b.h"', []),
    ],
)  # fmt: skip
def test_what_a_text_includes(text: str, names: list[str]) -> None:
    found = scan(text.encode())
    assert [include.name for include in found.includes] == names
    assert found.problems == ()


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('#define H "a.h"\n#include H', 2, "computed `#include H`"),
        ("#include NAME(a) // why", 1, "computed `#include NAME(a)`"),
        ("\n/* two\nlines */\n#\\\ninclude \\\nH", 4, "computed `#include H`"),
        ("// a\rb\r\n#include H", 2, "computed `#include H`"),
        ("#if __has_include(H)", 1, "computed `#if __has_include(H)`"),
        ("#define HAVE(x) __has_include(x)", 1, "computed"),
        ("#define HAS_INCLUDE(x) __has_include(PREFIX x)", 1, "computed"),
        ("#define PROBE __has_include", 1, "computed"),
        ("#define HAS_INCLUDES(x) __has_include(x)", 1, "computed"),
        ("#define A_HAS_INCLUDE(x) __has_include(x)\n#if A_HAS_INCLUDE(H)", 2, "computed"),
        ("int a;\nconst char *t = __TIME__;", 2, "uses `__TIME__`"),
        ('#define WHEN __DATE__ " " __TIME__', 1, "uses `__DATE__`"),
        ('auto s = "quoted"; auto t = __TIMESTAMP__;', 1, "uses `__TIMESTAMP__`"),
        ("char q = '\"'; auto t = __TIME__;", 1, "uses `__TIME__`"),
        ("f(1'000, '\"', __DATE__, 'b');", 1, "uses `__DATE__`"),
        ("#define SAY it's __TIME__", 1, "uses `__TIME__`"),
        ('??=include "a.h"', 0, "trigraph"),
        ('#embed "a.bin"', 1, "computed `#embed"),
        ('#import "a.h"', 1, "computed `#import"),
        ("#include <a/*b.h>", 0, "`//` or `/*` in the name"),
        ('auto s = R"x(a)\\\nx" /* )x";\n#include "a.h"', 0, "a line inside a raw string"),
        (b"#include <a\xff.h>".decode("latin-1"), 0, ""),
        ('#if 0\n"a"R"("\n#endif\n#include "/a.h"\n//)"', 0, "may end in two places"),
        ("#if 0\nL'a'R\"(\"\n#endif\n#include \"/a.h\"\n//)\"", 0, "may end in two places"),
        ('\\uR"(\n#include "/a.h"\n//)"', 0, "may end in two places"),
        ("1'0/*\n#include \"/a.h\"\n//*/", 0, "may end in two places"),
        ("#if 0\n1'f/*\n#endif\n#include \"/a.h\"\n//*/", 0, "may end in two places"),
        ("1f''/*\n#include \"/a.h\"\n//*/", 0, "may end in two places"),
        ("#1'0/*\n#include \"/a.h\"\n//*/", 0, "may end in two places"),
        ('__has_include(<R"(\n#include "/a.h"\n//)"', 0, "in the name of a header"),
        ("#define C(a, b) a##b\n#if C(__, has_include)(<a.h>)", 2, "computed"),
        ("#define A_HAS_INCLUDE C(__, has_include)(<a.h>)", 1, "computed"),
        ("#define C_HAS_INCLUDE B_HAS_INCLUDE WHERE", 1, "computed"),
        ("#if B_HAS_INCLUDE WHERE", 1, "computed"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_a_problem(text: str, line: int, reason: str) -> None:
    found = scan(text.encode("latin-1"))
    assert len(found.problems) == 1 or not reason
    assert found.problems
    if reason:
        assert reason in found.problems[0].reason
        assert found.problems[0].line == line


def test_a_problem_anywhere_in_the_closure_is_told_with_its_place() -> None:
    closure = closure_of({"/p/k.cu": '#include "a.h"', "/p/a.h": "\n\nint t = sizeof __TIME__;"})
    assert closure.problems == ("src/a.h:3 uses `__TIME__`",)


def test_an_absolute_name_and_a_way_out_of_the_root_are_problems() -> None:
    assert "absolute path" in closure_of({"/p/k.cu": '#include "/p/a.h"'}).problems[0]
    assert "leaves `src`" in closure_of({"/p/k.cu": '#include "../q/a.h"'}).problems[0]
    assert "leaves `src`" in closure_of({"/p/k.cu": '#include "../p/a.h"'}).problems[0]


PASTE = "#define C(a, b) a##b\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (PASTE + '#if C(__has_,include)("/a.h")', "__has_include"),
        (PASTE.replace("##", "%:%:") + '#if C(__has_,include)("/a.h")', "__has_include"),
        (PASTE + '#define Y(x) C(__has_inc,lude)(x)\n#if Y("/a.h")', "__has_include"),
        (PASTE + '#if C(__has_inclu,de_next)("/a.h")', "__has_include"),
        (PASTE + '#if C(C(__,has_), C(in,clude))("/a.h")', "__has_include"),
        (PASTE + '#if C(MY_HAS_,INCLUDE_X)("/a.h")', "__has_include"),
        (PASTE + "auto t = C(__TI,ME__);", "__TIME__"),
        (PASTE + "auto t = C(_,C(_DATE,__));", "__DATE__"),
        ("#define T _##_##TIME##_##_", "__TIME__"),
        ("#define SAY don't __TI\n" + PASTE + "auto t = C(SAY,ME__);", "__TIME__"),
        (PASTE + 'auto t = C(__,x); // TIME__\nauto u = "TIME__";', ""),
        (PASTE + "#error please include, what has_ __TI\n#include <include/ME__>", ""),
        ("auto t = C(__TI,ME__);", ""),
        (PASTE + "template <class D, class A, class T, int E> int f(int _, int __);", ""),
        (PASTE + "int h, a, s, _, i, n, c, l, u, d, e;", ""),
    ],
)
def test_what_could_be_pasted_to_a_name_that_counts_is_a_problem(text: str, name: str) -> None:
    halves = text.partition("\n") if text.startswith(PASTE) else (text, "", "")
    for files in (
        {"/p/k.cu": text},
        {"/p/k.cu": f'#include "a.h"\n{halves[2]}', "/p/a.h": f"{halves[0]}\n"},
    ):
        problems = closure_of(files).problems
        assert len(problems) == bool(name), problems
        assert not name or f"may come to `{name}` by `##`" in problems[0]


def test_a_number_with_quotes_is_read_in_both_ways() -> None:
    both = scan(b"int x = 1'000; // it's\n#define N 1'000 /* a thousand */\n#include <a.h>\n")
    assert [one.name for one in both.includes] == ["a.h"]
    assert both.problems == ()


def test_names_of_any_length_are_followed(tmp_path: Path) -> None:
    name = "d" * 250 + "/" + "n" * 248 + ".h"
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("")
    (tmp_path / "k.cu").write_text(f'#include "{name}"\n#include "{"x" * 5000}.h"\n')
    layout = Layout.of(str(tmp_path))
    closure = resolve(str(tmp_path / "k.cu"), layout, Disk())
    assert paths(closure) == ["src/k.cu", f"src/{name}"]
    assert changed(closure, layout, Disk()) == ""


def test_a_missing_source_is_an_error() -> None:
    with pytest.raises(CompileError, match=r"there is no file `/p/k\.cu`"):
        closure_of({})


# What changed: each row of faults that a key on the source alone, or on files read alone, has.


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    write(root, {
        "k.cu": '#include "top.h"\n__global__ void k(int *x) { *x = LEAF; }\n',
        "inc/top.h": '#include "mid/mid.h"\n#include <missing.h>\n',
        "inc/mid/mid.h": '#include "../leaf.h"\n#if __has_include(<maybe.h>)\n#endif\n',
        "inc/leaf.h": "#pragma once\n#define LEAF 1\n#ifndef __CUDA_ARCH__\nint host;\n#endif\n",
        "first/other.h": "",
    })  # fmt: skip
    return root


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def resolved(root: Path, memo: dict | None = None) -> tuple[Closure, Layout]:
    layout = Layout.of(str(root), ("first", "inc"))
    return resolve(str(root / "k.cu"), layout, Disk(memo)), layout


def test_nothing_changed_when_nothing_did(tree: Path) -> None:
    memo: dict = {}
    closure, layout = resolved(tree, memo)
    assert closure.problems == ()
    assert changed(closure, layout, Disk(memo)) == ""
    assert changed(closure, layout, Disk()) == ""


@pytest.mark.parametrize("leaf", ["k.cu", "inc/top.h", "inc/mid/mid.h", "inc/leaf.h"])
@pytest.mark.parametrize("remember", [True, False])
def test_an_edit_of_any_file_is_seen(tree: Path, leaf: str, remember: bool) -> None:
    memo: dict | None = {} if remember else None
    closure, layout = resolved(tree, memo)
    with (tree / leaf).open("a") as file:
        file.write("// more\n")
    assert changed(closure, layout, Disk(memo)) == f"`src/{leaf}` changed"
    assert resolved(tree, memo)[0].files != closure.files


def test_text_that_only_the_host_would_see_is_part_of_the_key(tree: Path) -> None:
    closure, layout = resolved(tree)
    leaf = tree / "inc/leaf.h"
    leaf.write_text(leaf.read_text().replace("int host", "long host"))
    assert changed(closure, layout, Disk()) == "`src/inc/leaf.h` changed"


@pytest.mark.parametrize(
    "name",
    ["top.h", "first/top.h", "first/missing.h", "inc/missing.h", "inc/maybe.h", "inc/mid/top.h"],
)
def test_a_file_that_appears_where_one_was_looked_for_is_seen(tree: Path, name: str) -> None:
    closure, layout = resolved(tree)
    write(tree, {name: "\n"})
    looked_for = name != "inc/mid/top.h"
    assert changed(closure, layout, Disk()) == (f"`src/{name}` is there now" if looked_for else "")
    again = resolved(tree)[0]
    assert (again.files != closure.files) is looked_for


def test_a_file_or_a_directory_that_went_is_seen(tree: Path) -> None:
    closure, layout = resolved(tree)
    (tree / "inc/leaf.h").rename(tree / "leaf.h")
    assert changed(closure, layout, Disk()) == "`src/inc/leaf.h` is gone"
    (tree / "leaf.h").rename(tree / "inc/leaf.h")
    (tree / "inc/mid/mid.h").unlink()
    (tree / "inc/mid").rmdir()
    assert "is gone" in changed(closure, layout, Disk())


def test_new_times_and_a_copy_elsewhere_change_nothing(tree: Path, tmp_path: Path) -> None:
    memo: dict = {}
    closure, layout = resolved(tree, memo)
    for path in tree.rglob("*.h"):
        os.utime(path, ns=(time.time_ns(), 1_234_567_890))
    assert changed(closure, layout, Disk(memo)) == ""
    shutil.copytree(tree, tmp_path / "moved" / "under another name")
    copy, there = resolved(tmp_path / "moved" / "under another name", memo)
    assert copy == closure
    assert changed(closure, there, Disk(memo)) == ""


def test_a_memo_is_used_for_what_did_not_change_and_for_nothing_fresh(tree: Path) -> None:
    old = time.time_ns() - 10_000_000_000
    memo: dict = {}
    resolved(tree, memo)
    assert memo == {}, "these files are younger than the memo trusts"
    for path in (*tree.rglob("*.h"), tree / "k.cu"):
        os.utime(path, ns=(old, old))
    resolved(tree, memo)
    assert memo == {}, "the time of their last change cannot be set back"


def test_the_memo_answers_without_reading(tree: Path) -> None:
    path = str(tree / "k.cu")
    found = os.stat(path)
    known = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
    assert Disk({path: (known, "remembered")}).find(path) == Found(known[3:], "remembered")
    other = Disk({path: ((known[0] + 1, *known[1:]), "remembered")}).find(path)
    assert other == Found(known[3:], digest((tree / "k.cu").read_bytes()))


def test_one_file_by_two_names_stays_one(tree: Path) -> None:
    write(tree, {"k.cu": '#include "a.h"\n#include "b.h"\n', "a.h": "#pragma once\nint x;\n"})
    os.link(tree / "a.h", tree / "b.h")
    closure, layout = resolved(tree)
    assert [(header.path, header.first) for header in closure.files[1:]] == [
        ("src/a.h", "src/a.h"),
        ("src/b.h", "src/a.h"),
    ]
    (tree / "b.h").unlink()
    (tree / "b.h").write_text((tree / "a.h").read_text())
    assert "no longer is the same file" in changed(closure, layout, Disk())
    two, layout = resolved(tree)
    assert two.files != closure.files
    (tree / "b.h").unlink()
    (tree / "b.h").symlink_to("a.h")
    assert changed(two, layout, Disk()) == "two headers have become one file"


def test_a_link_that_leads_dotdot_elsewhere_is_a_problem(tree: Path, tmp_path: Path) -> None:
    write(tmp_path, {"far/away/x.h": "", "far/up.h": ""})
    write(tree, {"k.cu": '#include "near/../up.h"\n'})
    (tree / "near").symlink_to(tmp_path / "far/away")
    assert "is not `src/up.h`" in resolved(tree)[0].problems[0]


def test_a_detour_that_comes_to_lead_elsewhere_is_seen(tree: Path, tmp_path: Path) -> None:
    write(tmp_path, {"far/away/x.h": "", "far/up.h": "", "far/new.h": ""})
    write(tree, {
        "k.cu": '#include "near/../up.h"\n#include "none/../new.h"\n',
        "up.h": "",
        "near/x.h": "",
    })  # fmt: skip
    closure, layout = resolved(tree)
    assert closure.problems == ()
    assert closure.detours == ("src/near/../up.h",)
    assert "src/none/../new.h" in closure.absent
    (tree / "none").symlink_to(tmp_path / "far/away")
    assert changed(closure, layout, Disk()) == "`src/none/../new.h` is there now"
    (tree / "none").unlink()
    assert changed(closure, layout, Disk()) == ""
    (tree / "near").rename(tree / "was near")
    assert changed(closure, layout, Disk()) == "`src/near/../up.h` no longer is `src/up.h`"
    (tree / "near").symlink_to(tmp_path / "far/away")
    assert changed(closure, layout, Disk()) == "`src/near/../up.h` no longer is `src/up.h`"


def test_a_scan_is_made_once_for_a_digest(tree: Path) -> None:
    scans: dict = {}
    layout = Layout.of(str(tree), ("first", "inc"))
    once = resolve(str(tree / "k.cu"), layout, Disk(), scans=scans)
    assert set(scans) == {header.digest for header in once.files}
    assert resolve(str(tree / "k.cu"), layout, Disk(), scans=scans) == once
    scans[once.files[0].digest] = scan(b"")
    assert paths(resolve(str(tree / "k.cu"), layout, Disk(), scans=scans)) == ["src/k.cu"]


def test_an_edit_between_hash_and_scan_is_an_error(tree: Path) -> None:
    class Edited(Disk):
        def find(self, path: str) -> Found | None:
            found = super().find(path)
            if path.endswith("leaf.h"):
                with open(path, "a") as file:
                    file.write("// edited\n")
            return found

    layout = Layout.of(str(tree), ("first", "inc"))
    with pytest.raises(CompileError, match=r"`src/inc/leaf.h` changed while it was read"):
        resolve(str(tree / "k.cu"), layout, Edited())


# Against NVRTC: whatever it opens must be in the closure.


@pytest.fixture(scope="module")
def nvrtc() -> None:
    try:
        NVRTC.load()
    except ToolchainError as error:
        pytest.skip(f"needs NVRTC: {error.message}")


Names = st.sampled_from(["a.h", "b.h", "s/a.h", "s/c.h", "../a.h", "../s/b.h", "s/../b.h"])
Forms = st.sampled_from([
    '#if __has_include("{}")\n#include "{}"\n#endif',
    "#if __has_include(<{}>)\n#include <{}>\n#endif",
    '#if __has_include("{}")\n#/**/include/*\n*/ "{}"\n#endif',
    "#if __has_include(<{}>)\n#inc\\\nlude <{}>\n#endif",
    '#if 0\nisn\'t\n#else\n%:if __has_include("{}") // it\'s\n  #include "{}"\n#endif\n#endif',
    '/* #include "{}" */',
    '// \\\n#include "{}"',
    '__device__ const char *s = R"(\n#include "{}"\n)";',
])  # fmt: skip
Lines = st.lists(st.tuples(Forms, Names), max_size=3)
Places = st.sampled_from([
    directory + name
    for directory in ("", "one/", "two/")
    for name in ("a.h", "b.h", "s/a.h", "s/b.h", "s/c.h")
])  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(files=st.dictionaries(Places, Lines, max_size=8), source=Lines)
def test_nvrtc_opens_nothing_beyond_the_closure(
    nvrtc: None, tmp_path_factory: pytest.TempPathFactory, files: dict, source: list
) -> None:
    root = tmp_path_factory.mktemp("tree")

    def identifier(path: str) -> str:
        return re.sub(r"\W", "_", path)

    def text(lines: list[tuple[str, str]], path: str) -> str:
        # Each file that is read adds a kernel of its own; the guard ends circles.
        body = "\n".join(form.replace("{}", name) for form, name in lines)
        name = identifier(path)
        return (
            f"#ifndef G_{name}\n#define G_{name}\n{body.replace(' *s =', f' *s_{name} =')}\n"
            f'extern "C" __global__ void read_{name}() {{}}\n#endif\n'
        )

    write(root, {f"p/{path}": text(lines[:2], path) for path, lines in files.items()})
    write(root, {"p/k.cu": text(source, "k.cu")})
    closure = resolve(str(root / "p/k.cu"), Layout.of(str(root / "p"), ("one", "two")), Disk())
    include_args = [f"-I{root}/p/one", f"-I{root}/p/two"]
    source_text = (root / "p/k.cu").read_bytes()
    try:
        compiled = compile_cubin(source_text, str(root / "p/k.cu"), "compute_80", include_args)
    except CompileError as error:
        assert "already been defined" in str(error)  # a string twice in one file
        return
    opened = set(re.findall(r"\.entry read_(\w+)\(", compiled.ptx.decode()))
    assert closure.problems or opened <= {
        identifier(header.path.removeprefix("src/")) for header in closure.files
    }
