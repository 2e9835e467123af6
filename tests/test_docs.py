"""The pages are true: their commands run, their settings load, their links lead somewhere.

A fenced `sh` block is run, line by line as it stands, in a copy of `examples/kernels` that all
blocks of its page share; a `text` block after it is what it prints, numbers and digests aside.
What is not run is listed here, with the reason.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import max_build
from doc_pages import Block, Page, pages
from max_build import pytest_plugin
from max_build.cli import COMMANDS, parser
from max_build.config import cache_settings, load_settings
from support import ROOT

PAGES = {page.name: page for page in pages()}

MINUTES = "MAX compiles for minutes; the demonstrations have tests of their own"
NETWORK = "installs from a package index; tests/frontends installs, from a wheel"
SERVER = "sets up a server or a service; tests/servers runs nginx from the same file"
OTHERS = "of a machine that is not here; tests/cluster runs a farm"
NOT_RUN = {
    r"python3 -m venv \.venv && \.venv/bin/pip install hatch": NETWORK,
    r"(\.venv/bin/)?hatch run demo.*": MINUTES,
    r"\.venv/bin/hatch build -t wheel": NETWORK,
    r"(python -m )?pip install .*": NETWORK,
    r"sudo .*|echo .*sudo .*|cache/start .*": SERVER,
    r"MAX_BUILD_REMOTE=\S+ (MAX_BUILD_\S+ )?max-build (doctor|push)": SERVER,
    r"(host[AB]|you)\$ .*": OTHERS,
    r"cd examples/kernels": "the copy that commands are run in",
    r"python -m pytest": "tests/test_example_kernels.py runs it",
}

KERNELS = "cuda.core", "triton"


def blocks(*languages: str) -> list[pytest.param]:
    return [
        pytest.param(page, block, id=f"{name}:{block.line}")
        for name, page in PAGES.items()
        for block in page.blocks(*languages)
    ]


# --- commands


def commands(block: Block) -> Iterator[str]:
    """The command lines of a block; one that goes on, by a quote or a backslash, is one."""
    pending = ""
    for line in block.text.splitlines():
        pending += line + "\n"
        try:
            shlex.split(pending, comments=True)
        except ValueError:
            continue
        if not pending.rstrip().endswith("\\"):
            if shlex.split(pending, comments=True):
                yield pending.strip()
            pending = ""
    assert not pending, f"line {block.line}: {pending!r} does not end"


def left_out(command: str) -> bool:
    bare = " ".join(shlex.split(command, comments=True)) if "\n" not in command else command
    return any(
        re.fullmatch(pattern, text) for pattern in NOT_RUN for text in (bare, command.strip())
    )


def with_commands() -> list[str]:
    return [
        name
        for name, page in PAGES.items()
        if any(not left_out(one) for block in page.blocks("sh") for one in commands(block))
    ]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with this environment's `max-build` and `python`, first on the PATH."""
    folder = tmp_path_factory.mktemp("bin")
    for name, script in (("max-build", "-m max_build "), ("python", "")):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {script}"$@"\n')
        path.chmod(0o755)
    return folder


@pytest.mark.parametrize("name", with_commands())
def test_the_commands_of_a_page_do_what_it_says(name: str, tools: Path, tmp_path: Path) -> None:
    for module in KERNELS:
        pytest.importorskip(module, reason=f"`{module}` is not installed")
    work = tmp_path / "kernels"
    shutil.copytree(ROOT / "examples" / "kernels", work)
    settings = (work / "pyproject.toml").read_text()
    quick = re.sub(r"^targets = .*", 'targets = ["sm_90a"]', settings, flags=re.MULTILINE)
    (work / "pyproject.toml").write_text(quick)
    page = PAGES[name]
    found = page.blocks()
    for position, block in enumerate(found):
        if block.language != "sh":
            continue
        script = "\n".join(one for one in commands(block) if not left_out(one))
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=work,
            env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": "src"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{name}:{block.line}\n{script}\n{done.stdout}"
        if position + 1 < len(found) and found[position + 1].language == "text":
            shown = found[position + 1].text
            assert shape(done.stdout).endswith(shape(shown)), f"{name}:{block.line}\n{done.stdout}"


def shape(output: str) -> str:
    """Output less what differs between two machines or two releases of a compiler."""
    output = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b…?", "D", output)
    return " ".join(re.sub(r"\d+(?:\.\d+)*", "N", output).split())


def mentioned() -> list[pytest.param]:
    """Each `max-build …` that a page shows, in a block or in a sentence."""
    found: dict[str, str] = {}
    for name, page in PAGES.items():
        lines = [one for block in page.blocks("sh") for one in commands(block)]
        spans = [one for one in page.spans(quoted=False) if one.startswith("max-build ")]
        for line in (*lines, *spans):
            for part in re.split(r"&&|[|;]", line.partition("#")[0]):
                match = re.search(r"(?:^|\s)max-build (?P<rest>[a-z-].*)", part.strip())
                if match and "␊" not in part:
                    found.setdefault(match["rest"].strip(), name)
    return [pytest.param(text, id=f"{name}: {text}") for text, name in found.items()]


@pytest.mark.parametrize("text", mentioned())
def test_every_command_line_that_is_shown_can_be_parsed(text: str) -> None:
    arguments = shlex.split(re.sub(r"[\[\]…]", " ", text))
    if len(arguments) == 1 or arguments == ["key", "new"]:  # in a sentence, as a name
        assert arguments[0] in COMMANDS
        return
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            parser(arguments).parse_args(arguments)
        except SystemExit:
            pytest.fail(f"max-build {text}\n{said.getvalue()}")


def test_every_option_that_is_named_exists() -> None:
    known = set(re.findall(r'"(--[\w-]+)"', inspect.getsource(pytest_plugin)))
    known |= {f"--no-{one[2:]}" for one in known}
    todo = [parser([])]
    while todo:
        one = todo.pop()
        known |= set(one._option_string_actions)
        for action in one._actions:
            if isinstance(action.choices, dict):
                todo += action.choices.values()
    theirs = {"--no-deps", "--resources", "--show-stats", "--cleanup"}  # of pip, Dask and ccache
    for name, page in PAGES.items():
        text = "\n".join(page.spans(quoted=False))
        named = set(re.findall(r"(?<!\S)--[a-z][\w-]+", text))
        assert named <= known | theirs, name


def test_every_command_is_in_the_readme() -> None:
    for command in COMMANDS:
        assert re.search(rf"`(max-build )?{command}\b", PAGES["README.md"].text), command


# --- what else a page can be wrong about


@pytest.mark.parametrize(("page", "block"), blocks("toml"))
def test_every_toml_block_loads(page: Page, block: Block, tmp_path: Path) -> None:
    if "~/.config/" in block.text.partition("\n")[0]:
        (tmp_path / "max-build").mkdir()
        (tmp_path / "max-build" / "config.toml").write_text(block.text)
        cache_settings({"XDG_CONFIG_HOME": str(tmp_path)})
        return
    (tmp_path / "pyproject.toml").write_text(block.text)
    load_settings(tmp_path, environ={})


@pytest.mark.parametrize(("page", "block"), blocks("python"))
def test_every_python_block_is_python_and_uses_what_there_is(page: Page, block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "max_build":
            assert hasattr(max_build, node.attr), f"{page.name}:{block.line} {node.attr}"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = PAGES[name]
    for link in page.links():
        path, _, fragment = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), link
        assert not fragment or fragment in Page(target).anchors(), link


@pytest.mark.parametrize("name", PAGES)
def test_blocks_say_what_they_are(name: str) -> None:
    known = {"sh", "text", "toml", "python", "json"}
    assert {block.language for block in PAGES[name].blocks()} <= known


def test_variables_that_are_named_exist() -> None:
    text = "".join(path.read_text() for path in (ROOT / "max_build").rglob("*.py"))
    for name, page in PAGES.items():
        for variable in set(re.findall(r"\bMAX_BUILD_[A-Z_]*[A-Z]\b", page.text)):
            assert variable in text, f"{name}: {variable}"
