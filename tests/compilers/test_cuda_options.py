"""Options of CUDA units: equal effect, equal form; every mistake told; nothing let by unseen."""

from __future__ import annotations

from typing import Any

import pytest

from max_build.compilers.cuda_environment import relevant
from max_build.compilers.cuda_libraries import NVRTC
from max_build.compilers.cuda_options import NAMES, PTX_NAMES, decode, problems
from max_build.compilers.nvrtc import compile_cubin
from max_build.errors import ConfigError, ToolchainError


def canonical(**options: Any) -> dict[str, str]:
    return decode({name.replace("_", "-"): value for name, value in options.items()}).canonical()


def test_no_options_have_an_empty_form() -> None:
    assert canonical() == {}
    assert decode({}).linker_arguments() == ()


@pytest.mark.parametrize(
    "one",
    [
        {"std": "c++17"},
        {"defines": {}},
        {"use-fast-math": False},
        {"lineinfo": False, "debug": False},
        {"fmad": True, "ftz": False, "prec-div": True, "prec-sqrt": True},
        {"optimize": "full"},
        {"extra": []},
    ],
)
def test_a_default_is_the_same_as_nothing(one: dict[str, Any]) -> None:
    assert decode(one) == decode({})
    assert decode(one).canonical() == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"defines": {"N": 1}}, {"defines": {"N": "1"}}),
        ({"defines": {"N": True}}, {"defines": {"N": 1}}),
        ({"defines": {"N": False}}, {"defines": {"N": "0"}}),
        ({"defines": {"A": 1, "B": 2}}, {"defines": {"B": 2, "A": 1}}),
        ({"use-fast-math": True}, {"use-fast-math": True, "ftz": True, "prec-div": False}),
        ({"use-fast-math": True, "prec-sqrt": False}, {"use-fast-math": True, "fmad": True}),
        ({"debug": True}, {"debug": True, "lineinfo": True}),
        ({"extra": [" -restrict "]}, {"extra": ["-restrict"]}),
    ],
)
def test_an_equal_effect_has_an_equal_form(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert decode(one).canonical() == decode(other).canonical()
    assert decode(one).arguments() == decode(other).arguments()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"use-fast-math": True}, {"ftz": True, "prec-div": False, "prec-sqrt": False}),
        ({"use-fast-math": True}, {"use-fast-math": True, "ftz": False}),
        ({"optimize": "fast-compile"}, {}),
        ({"std": "c++20"}, {}),
        ({"maxrregcount": 32}, {"maxrregcount": 64}),
        ({"lineinfo": True}, {"debug": True}),
        ({"defines": {"N": ""}}, {"defines": {"N": 1}}),
        ({"defines": {"A": "1 B=2"}}, {"defines": {"A": "1", "B": "2"}}),
        ({"extra": ["-restrict", "-w"]}, {"extra": ["-w", "-restrict"]}),
        ({"defines": {"std": "c++20"}}, {"std": "c++20"}),
    ],
)
def test_another_effect_has_another_form(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert decode(one).canonical() != decode(other).canonical()
    assert decode(one).arguments() != decode(other).arguments()


def test_the_arguments_of_everything_at_once() -> None:
    options = decode({
        "std": "c++20", "defines": {"N": 4, "TEXT": '"a b"'}, "use-fast-math": True, "ftz": False,
        "maxrregcount": 64, "lineinfo": True, "optimize": "fast-compile",
        "extra": ["-restrict", "-Xptxas", "-v"],
    })  # fmt: skip
    assert options.arguments() == (
        "--std=c++20", "--define-macro=N=4", '--define-macro=TEXT="a b"', "--use_fast_math",
        "--fmad=true", "--ftz=false", "--prec-div=false", "--prec-sqrt=false",
        "--maxrregcount=64", "--generate-line-info", "-Ofc=max", "-restrict", "-Xptxas", "-v",
    )  # fmt: skip
    ptx = decode({"maxrregcount": 32, "lineinfo": True}, PTX_NAMES)
    assert ptx.linker_arguments() == ("-maxrregcount=32", "-lineinfo")


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        decode({
            "st": "c++17", "use_fast_math": True, "colour": 1, "lineinfo": "yes", "fmad": 1,
            "maxrregcount": 0, "std": "c++03", "optimize": "O3",
            "defines": {
                "1a": 1, "T": "__TIME__", "H": "__has_include(<a.h>)", "L": [1], "M": "a\nb",
            },
            "extra": ["-w", ""],
        })  # fmt: skip
    told = str(caught.value)
    where = "`options."
    assert told.splitlines() == [
        f"{where}st` is unknown; did you mean `std`?",
        f"{where}use_fast_math` is unknown; did you mean `use-fast-math`?",
        f"{where}colour` is unknown; there are {', '.join(f'`{name}`' for name in NAMES)}",
        f"{where}lineinfo` must be a boolean, got 'yes'",
        f"{where}fmad` must be a boolean, got 1",
        f"{where}maxrregcount` must be a whole number from 1 to 255, got 0",
        f"{where}std` must be one of `c++11`, `c++14`, `c++17`, `c++20`, `c++23`, got 'c++03'",
        f"{where}optimize` must be one of `full`, `fast-compile`, got 'O3'",
        f"{where}defines.1a` must be named as a C++ identifier",
        f"{where}defines.T` must not use `__TIME__`, which differs in every compile",
        f"{where}defines.H` must not ask for headers, which are to be known before",
        f"{where}defines.L` must be a string, a number or a boolean, got [1]",
        f"{where}defines.M` must be one line",
        f"{where}extra` has an empty item or one of several lines at 2",
    ]


@pytest.mark.parametrize("options", [{"defines": 1}, {"extra": "-w"}, {"extra": [1]}, {"std": 17}])
def test_a_value_of_the_wrong_type_is_told(options: dict[str, Any]) -> None:
    assert [name for name, _ in problems(options)] == list(options)


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (["-I/usr/include"], "include-dirs"),
        (["-I", "/usr/include"], "include-dirs"),
        (["  -I=/usr/include"], "include-dirs"),
        (["--include-path=/usr/include"], "include-dirs"),
        (["--include-path", "/usr/include"], "include-dirs"),
        (["--pre-include=a.h"], "include-dirs"),
        (["-include", "a.h"], "include-dirs"),
        (["-no-source-include"], "include-dirs"),
        (["--use-bundled-headers"], "include-dirs"),
        (["-Xcudafe", "--diag_suppress=177"], "unseen"),
        (["-arch=sm_90"], "the unit's target"),
        (["--gpu-architecture", "sm_90"], "the unit's target"),
        (["-time=-"], "reads or writes files"),
        (["--time", "out.csv"], "reads or writes files"),
        (["-fdevice-time-trace=x.json"], "reads or writes files"),
        (["--pch"], "reads or writes files"),
        (["-create-pch=a"], "reads or writes files"),
        (["--create_pch=a"], "reads or writes files"),
        (["-use-pch", "a"], "reads or writes files"),
        (["-pch-dir=/tmp"], "reads or writes files"),
        (["-dlto"], "no cubin"),
        (["-rdc=true"], "no cubin"),
        (["-dc"], "no cubin"),
        (["--optix-ir"], "no cubin"),
        (["-fdevice-syntax-only"], "no cubin"),
        (["-no-cache"], "own cache"),
        (["-split-compile=0"], "how many CPUs"),
        (["-DN=4"], "the option `defines`"),
        (["-D", "N=4"], "the option `defines`"),
        (["--std=c++03"], "the option `std`"),
        (["-G"], "the option `debug`"),
        (["-lineinfo"], "the option `lineinfo`"),
        (["-use_fast_math"], "the option `use-fast-math`"),
        (["-Ofc=mid"], "the option `optimize`"),
        (["-dopt=on"], "the option `optimize`"),
        (["-Xptxas", "-v", "-I/usr"], "include-dirs"),
    ],
)
def test_a_flag_with_side_effects_or_a_name_of_its_own_is_refused(
    items: list[str], reason: str
) -> None:
    found = list(problems({"extra": items}))
    assert len(found) == 1
    assert reason in found[0][1]


@pytest.mark.parametrize(
    "items",
    [
        ["-restrict"], ["-w"], ["-default-device"], ["--device-int128"], ["-Xptxas", "-v"],
        ["-Xptxas=-v"], ["--ptxas-options", "-dlcm=cg"], ["-diag-suppress=177"], ["-UN"],
        ["--jump-table-density=50"], ["--something-nobody-knows"],
    ],
)  # fmt: skip
def test_any_other_flag_goes_into_the_form_as_it_is(items: list[str]) -> None:
    assert canonical(extra=items) == {"extra": "\n".join(items)}


def test_fast_compile_and_debug_do_not_go_together() -> None:
    assert list(problems({"debug": True, "optimize": "fast-compile"})) == [
        ("optimize", "has no effect together with `debug`")
    ]


SOURCE = b"""
__device__ __noinline__ float wave(float x) { return sinf(x) / x + sqrtf(x) * x + 1e-39f * x; }
extern "C" __global__ void k(float *x, int n) {
    for (int i = threadIdx.x; i < n; i += 32) x[i] = x[i] * x[i + 1] + wave(x[i]) / x[i + 2] + N;
}
"""


@pytest.mark.parametrize(
    "written",
    [
        {"use-fast-math": True},
        {"use-fast-math": True, "ftz": False, "fmad": False},
        {"use-fast-math": True, "prec-div": True, "prec-sqrt": False},
        {"ftz": True, "prec-div": False, "prec-sqrt": False},
        {"ftz": False, "prec-div": True, "prec-sqrt": True, "fmad": True},
    ],
)
def test_nvrtc_takes_the_arguments_for_what_was_written(written: dict[str, bool]) -> None:
    try:
        NVRTC.load()
    except ToolchainError as error:
        pytest.skip(f"needs NVRTC: {error.message}")
    # What was written and nothing else, fast math last: the order makes no difference.
    flags = [f"--{n}={str(v).lower()}" for n, v in written.items() if n != "use-fast-math"]
    fast = ["--use_fast_math"] if written.get("use-fast-math") else []
    plain = compile_cubin(SOURCE, "k.cu", "sm_90", ["-DN=1", *flags, *fast])
    arguments = decode({**written, "defines": {"N": 1}}).arguments()
    assert compile_cubin(SOURCE, "k.cu", "sm_90", arguments).cubin == plain.cubin


@pytest.mark.parametrize(
    "items",
    [
        ["-Xptxas", "--options-file=F"],
        ["-Xptxas", " -optf=F"],
        ["-Xptxas", "-optf", "-Xptxas", "F"],
        ["-Xptxas=--options-file=F"],
        ["--ptxas-options=-optf=F"],
        ["--ptxas-options", "-optf=F"],
        ["-Xptxas", "-v,-optf=F"],
        ["-Xptxas", "-v -optf=F"],
        ["-Xptxas", '"-optf=F"'],
        ["-Xptxas", "F"],
        ["-Xptxas", "-o=F"],
        ["-Xptxas", "--fdevice-time-trace=F"],
        ["-Xptxas", "-compilerStatsFile=F"],
        ["-Xptxas", "--gpu-name=sm_80"],
        ["-Xptxas", "--split-compile=0"],
    ],
)
def test_options_of_ptxas_that_could_name_a_file_are_refused(items: list[str]) -> None:
    found = list(problems({"extra": items}))
    assert found
    assert "ptxas" in found[0][1]


def test_plain_options_of_ptxas_are_let_through() -> None:
    items = ["-Xptxas", "-O1", "-Xptxas=-dlcm=ca", "--ptxas-options=--register-usage-level=10"]
    assert not list(problems({"extra": items}))


def test_a_macro_must_not_paste() -> None:
    assert "##" in next(problems({"defines": {"T": "__TI##ME__"}}))[1]


def test_a_variable_that_changes_the_code_is_in_the_key() -> None:
    assert relevant({"PATH": "x", "NV_NVVM_VERSION": "", "NVRTC_APPEND_FLAGS": "-G"}) == ({}, "")
    assert relevant({"NV_NVVM_VERSION": "nvvm-latest"})[0] == {"NV_NVVM_VERSION": "nvvm-latest"}
    assert "NVRTC_APPEND_FLAGS" in relevant({"NVRTCWIZ": "1", "NVRTC_APPEND_FLAGS": "-G"})[1]
