"""The contract of compiler adapters: max-build's own keep it, and it tells those that do not."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

import toy_repo
from doc_pages import Page
from kernel_repos import CHAIN
from max_build.errors import MaxBuildError
from max_build.testing.compiler import CompilerContract
from max_build.testing.trials import Trials
from support import GRAPH, ROOT


def needs(module: str, distribution: str) -> pytest.MarkDecorator:
    try:
        missing = importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        missing = True
    return pytest.mark.skipif(missing, reason=f"{distribution} is not installed")


@needs("cuda.bindings", "cuda-bindings")
class TestCuda(CompilerContract):
    compiler = "cuda"
    targets = ("sm_80", "sm_90a")
    files = CHAIN
    unit = {"source": "kernels/chain.cu", "include-dirs": ["include"], "names": ["chain"]}
    edits = (
        {"include/deep/third.cuh": CHAIN["include/deep/third.cuh"].replace("3.0f", "4.0f")},
        {"kernels/chain.cu": CHAIN["kernels/chain.cu"] + "// a comment counts\n"},
    )
    harmless = ({"kernels/second.cuh": "// an angled name is not looked for here\n"},)
    options = (
        {"options": {"std": "c++20"}},
        {"options": {"defines": {"N": 4}}},
        {"options": {"lineinfo": True}},
        {"names": []},
        {"keep-ptx": True},
        {"include-dirs": ["include", "kernels"]},
    )
    wrong = {"options.std": {"options": {"std": "c++"}}, "num-warps": {"num-warps": 8}}
    broken = {"kernels/chain.cu": 'extern "C" __global__ void chain(float* x) { x[0] = y; }\n'}
    heavy = ("cuda.bindings", "cuda.core")


PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry nothing() { ret; }
"""


@needs("cuda.bindings", "cuda-bindings")
class TestPtx(CompilerContract):
    compiler = "ptx"
    targets = ("sm_80", "sm_90a")
    files = {"k/nothing.ptx": PTX}
    unit = {"source": "k/nothing.ptx"}
    edits = ({"k/nothing.ptx": PTX.replace("7.0", "7.1")},)
    options = (
        {"names": ["nothing"]},
        {"keep-ptx": True},
        {"options": {"maxrregcount": 32}},
        {"options": {"lineinfo": True}},
    )
    wrong = {
        "options.maxrregcount": {"options": {"maxrregcount": "many"}},
        "include-dirs": {"include-dirs": ["include"]},
    }
    broken = {"k/nothing.ptx": PTX.replace("ret", "return")}
    heavy = ("cuda.bindings", "cuda.core")


KERNEL = """
import triton
import triton.language as tl


@triton.jit
def add(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)
"""


@needs("triton", "Triton")
class TestTriton(CompilerContract):
    compiler = "triton"
    targets = ("sm_80", "sm_90a")
    files = {"src/rows/__init__.py": "", "src/rows/kernels.py": KERNEL}
    unit = {
        "entry": "rows.kernels:add",
        "signature": {"x": "*fp32:16", "n": "i32"},
        "constexprs": {"BLOCK": 128},
    }
    edits = ({"src/rows/kernels.py": KERNEL.replace("+ 1,", "+ 2,")},)
    harmless = ({"src/rows/kernels.py": "# a comment\n" + KERNEL},)
    options = (
        {"num-warps": 8},
        {"signature": {"x": "*fp32", "n": "i32"}},
        {"constexprs": {"BLOCK": 64}},
    )
    wrong = {"signature.x": {"signature": {"x": "*float", "n": "i32"}}}
    broken = {"src/rows/kernels.py": KERNEL.replace("tl.arange", "tl.range_of")}
    heavy = ("triton",)


@pytest.mark.slow
@needs("max", "MAX")
class TestMax(CompilerContract):
    compiler = "max"
    kind = "graph"
    targets = ("cpu", "sm_90a")
    files = {"src/toy/__init__.py": "", "src/toy/graph.py": GRAPH}
    unit = {"entry": "toy.graph:build"}
    edits = ({"src/toy/graph.py": GRAPH.replace("2.0,", "5.0,")},)
    harmless = ({"src/toy/graph.py": GRAPH + "# a comment\n"},)
    options = ({"host": "x86-64-v2"}, {"options": {"defines": {"N": 4}}})
    wrong = {"host": {"host": "i386"}, "options.N": {"options": {"N": 4}}}
    broken = {"src/toy/graph.py": GRAPH.replace("x * scale", "x * nothing")}
    heavy = ("max", "numpy")
    reproducible = False  # MAX orders kernels differently in two compiles of one graph


DOCUMENTED = Page(ROOT / "cache" / "keys.md").blocks("python")
ADAPTER, TESTS = (
    next(block.text for block in DOCUMENTED if f"class {name}" in block.text)
    for name in ("TemplateCompiler", "TestTemplateCompiler")
)


def install_documented(site: Path, monkeypatch: pytest.MonkeyPatch, text: str = ADAPTER) -> None:
    """Install the adapter that the page of keys shows, or another text in its place."""
    point = "[max_build.compilers]\nptx-template = ptx_template:TemplateCompiler\n"
    toy_repo.write_distribution(site, "ptx-template", "1.0", {"ptx_template.py": text}, point)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    monkeypatch.delitem(sys.modules, "ptx_template", raising=False)
    toy_repo.forget()


class TestToy(CompilerContract):
    compiler = "toy"
    kind = "graph"
    targets = ("cpu", "sm_90a")
    files = {"src/toy/__init__.py": "", "src/toy/unit.py": "def build(target): return 'one'\n"}
    unit = {"entry": "toy.unit:build"}
    edits = ({"src/toy/unit.py": "def build(target): return 'two'\n"},)
    harmless = ({"src/toy/unit.py": "def build(to): return 'one'\n"},)
    options = ({"options": {"level": 1}}, {"options": {"level": 2}})
    broken = {"src/toy/unit.py": "def build(target): return\n  'one'\n"}

    @pytest.fixture(autouse=True)
    def toy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        toy_repo.install(tmp_path / "site", monkeypatch)


def documented() -> type[CompilerContract]:
    """The tests that the page shows for its adapter."""
    found: dict[str, type[CompilerContract]] = {}
    exec(TESTS, found)
    return found["TestTemplateCompiler"]


class TestDocumented(documented()):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def site(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install_documented(tmp_path / "site", monkeypatch)


# --- each test can fail

READ = "template = (job.root / source).read_bytes()"
HASHED = "digest(template)"
OPTIONS = 'options={name: str(value) for name, value in job.unit.declared["options"].items()},'
PATH = 'path = job.scratch / "kernel.ptx"'

FAULTS = {
    # what is wrong: the test that says so, and what stands in place of what in the adapter
    "goes by another name": ("it_says_what_it_takes", 'name = "ptx-template"', 'name = "other"'),
    "takes no such target": ("it_says_what_it_takes", 'one.api == "cuda"', 'one.api == "hip"'),
    "imports its compiler": ("loading_it_loads_no_compiler", "import re", "import re, colorsys"),
    "derives with its compiler": (
        "loading_it_loads_no_compiler",
        READ,
        f"import colorsys; {READ}",
    ),
    "refuses what is right": (
        "a_good_declaration_has_no_problem",
        "not isinstance(value, str | int)",
        "value == '1'",
    ),
    "names no key": ("a_wrong_declaration_is_told_by_its_key", 'f"options.{name}"', '"options"'),
    "takes what is wrong": ("a_wrong_declaration_is_told_by_its_key", "str | int", "object"),
    "has a source in full": ("the_components_are_filled", HASHED, "template.decode()"),
    "does not say what compiled": (
        "the_components_are_filled",
        'identities(("ptx-template",))',
        'identities(("of-nobody",))',
    ),
    "has a leaf that is no text": ("the_components_are_filled", OPTIONS, 'options={"level": 1},'),
    "has a set's order": (
        "two_machines_make_one_key",
        HASHED,
        "digest(template + repr({*'abcdefgh'}).encode())",
    ),
    "has the working directory": (
        "two_machines_make_one_key",
        HASHED,
        "digest(template + __import__('os').getcwd().encode())",
    ),
    "needs its memory": (
        "two_machines_make_one_key",
        READ,
        f'job.memory.get("mine", source); {READ}',
    ),
    "counts its jobs": (
        "a_process_derives_the_same_again",
        HASHED,
        "digest(template + str(next(_COUNT)).encode())",
    ),
    "has a path": (
        "nothing_of_the_machine_is_in_the_components",
        OPTIONS,
        'options={"from": str(job.root)},',
    ),
    "has a path of all": (
        "nothing_of_the_machine_is_in_the_components",
        OPTIONS,
        'options={"from": "-I/usr/lib"},',
    ),
    "has the user": (
        "nothing_of_the_machine_is_in_the_components",
        OPTIONS,
        'options={"by": __import__("getpass").getuser()},',
    ),
    "leaves the target out": ("each_target_has_a_key", "str(job.target)", '"sm_80"'),
    "leaves an option out": ("each_option_has_a_key", ".items()},", '.items() if name == "BODY"},'),
    "has the name of a source": ("an_edited_source_has_a_key", HASHED, "digest(source.encode())"),
    "believes its memory": (
        "what_was_remembered_of_a_file_is_checked",
        READ,
        "template = _SEEN.setdefault(job.root, (job.root / source).read_bytes())",
    ),
    "counts files": (
        "what_does_not_matter_keeps_the_key",
        OPTIONS,
        'options={"files": str(len(list(job.root.iterdir())))},',
    ),
    "writes elsewhere": (
        "an_artifact_lies_below_the_scratch_directory",
        PATH,
        'path = __import__("pathlib").Path(__import__("tempfile").mkdtemp(), "kernel.ptx")',
    ),
    "leaves a temporary file": (
        "an_artifact_lies_below_the_scratch_directory",
        PATH,
        f'{PATH}; __import__("tempfile").mkstemp()',
    ),
    "writes nothing": ("an_artifact_lies_below_the_scratch_directory", "_text(text)", '_text("")'),
    "has a role of its own": ("an_artifact_lies_below_the_scratch_directory", '"ptx": p', '"o": p'),
    "calls text a cubin": ("machine_code_is_for_its_target", '{"ptx": path}', '{"cubin": path}'),
    "names no kernel": ("a_product_says_what_is_in_it", "for name in names", "for name in ()"),
    "never does the same twice": (
        "two_compiles_give_the_same_bytes",
        "_text(text)",
        '_text(text + __import__("os").urandom(8).hex())',
    ),
    "compiles what lies there now": (
        "what_was_derived_is_what_is_compiled",
        "derivation.state.decode()",
        '(job.root / job.unit.declared["source"]).read_text()',
    ),
    "does not say where": ("a_broken_source_is_a_compile_error", "`{source}`: {type", "{type"),
    "raises what it gets": (
        "a_broken_source_is_a_compile_error",
        "(KeyError, ValueError)",
        "OSError",
    ),
    "writes beside the source": (
        "nothing_is_written_in_the_project",
        PATH,
        f'{PATH}; (job.root / "k.o").touch()',
    ),
    "goes away": (
        "the_process_is_left_as_it_was",
        READ,
        f'{READ}; __import__("os").chdir(job.root)',
    ),
    "sets a variable": (
        "the_process_is_left_as_it_was",
        PATH,
        f'{PATH}; __import__("os").environ["OPT"] = "1"',
    ),
    "never hits": (
        "a_build_misses_then_hits_and_an_edit_misses",
        HASHED,
        'digest(template + str(__import__("os").getpid()).encode())',
    ),
}
DIRECT_FAULTS = {
    "reads the home": (
        "it_answers_for_what_the_compiler_takes_from_the_machine",
        'if name.startswith("TOY_")',
        'if name == "HOME"',
    ),
    "names another": (
        "it_answers_for_what_the_compiler_takes_from_the_machine",
        "compiler=distributions.identities(self.distributions)",
        'compiler={"another": "1.0"}',
    ),
}


def tried(contract: type[CompilerContract], test: str, folder: Path) -> None:
    trials = Trials(contract, folder / "contract")
    with pytest.raises((AssertionError, MaxBuildError, pytest.fail.Exception)) as caught:
        getattr(contract(), f"test_{test}")(trials)
    # It is the adapter that is at fault, and not its text here.
    assert not re.search("SyntaxError|NameError|cannot be loaded", str(caught.value))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_contract_tells_an_adapter_that(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test, old, new = FAULTS[fault]
    assert ADAPTER.count(old) == 1
    shared = "import itertools\n_COUNT, _SEEN = itertools.count(), {}\n"
    install_documented(tmp_path / "site", monkeypatch, shared + ADAPTER.replace(old, new))
    contract = type("Heavy", (documented(),), {"heavy": ("colorsys",)})
    tried(contract, test, tmp_path)


@pytest.mark.parametrize("fault", DIRECT_FAULTS)
def test_the_contract_tells_an_adapter_of_project_code_that(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test, old, new = DIRECT_FAULTS[fault]
    assert toy_repo.ADAPTER.count(old) == 1
    monkeypatch.setattr(toy_repo, "ADAPTER", toy_repo.ADAPTER.replace(old, new))
    toy_repo.install(tmp_path / "site", monkeypatch)
    tried(TestToy, test, tmp_path)


def test_each_test_of_the_contract_is_known_to_fail() -> None:
    tests = {name for name in vars(CompilerContract) if name.startswith("test_")}
    assert tests == {f"test_{one[0]}" for one in (*FAULTS.values(), *DIRECT_FAULTS.values())}
