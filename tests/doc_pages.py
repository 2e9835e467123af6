"""The pages of documentation, taken apart: blocks, code spans, headings, links."""

from __future__ import annotations

import ast
import functools
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support import ROOT

_FENCE = re.compile(r"^(```+)(\w*)[^\n]*\n(.*?)^\1[ ]*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and its line in the page, from 1."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """The text with nothing in place of its blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self, *languages: str) -> list[Block]:
        """The blocks in one of these languages, or all of them."""
        text = self.text
        found = [
            Block(match[2], match[3], text.count("\n", 0, match.start()) + 1)
            for match in _FENCE.finditer(text)
        ]
        return [one for one in found if not languages or one.language in languages]

    def spans(self, *, quoted: bool) -> list[str]:
        """Inline code: what is `quoted`, in two backticks, is a message; the rest is not."""
        return [
            " ".join(match[2].split())
            for match in _SPAN.finditer(self.prose)
            if (len(match[1]) > 1) == quoted
        ]

    def anchors(self) -> set[str]:
        """The fragment of each heading, as GitHub makes it."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {_fragment(one) for one in headings}

    def links(self) -> Iterator[str]:
        """Where its links lead, within the repository."""
        bare = _SPAN.sub("", self.prose)
        for target in re.findall(r"\]\(([^)\s]+)\)", bare):
            if "://" not in target:
                yield target


def pages() -> list[Page]:
    names = ["README.md", "examples/README.md", *sorted((ROOT / "cache").glob("*.md"))]
    return [Page(ROOT / name) for name in names]


def _fragment(heading: str) -> str:
    kept = [
        char
        for char in heading.strip().lower()
        if char in "-_ " or unicodedata.category(char)[0] in "LN"
    ]
    return "".join(kept).replace(" ", "-")


@functools.cache
def messages() -> set[str]:
    """Every text in the sources of max-build but docstrings, `…` for what is filled in."""
    found: set[str] = set()
    for path in (ROOT / "max_build").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = _imported(tree) | _constants(tree)
        documents = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.add(plain("".join(_part(one, constants) for one in node.values)))
            elif isinstance(node, ast.Constant) and id(node) not in documents:
                found.add(plain(str(node.value)))
    return found


def plain(message: str) -> str:
    """A message on one line; what is filled in beside each other counts once."""
    return re.sub("…+", "…", " ".join(message.split()))


def _imported(tree: ast.Module) -> dict[str, str]:
    """The constants that a module takes from others of max-build."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("max_build."):
            path = ROOT / f"{(node.module or '').replace('.', '/')}.py"
            if path.is_file():
                theirs = _constants(ast.parse(path.read_text(encoding="utf-8")))
                found |= {one.name: theirs[one.name] for one in node.names if one.name in theirs}
    return found


def _constants(tree: ast.Module) -> dict[str, str]:
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def _part(node: ast.expr, constants: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.FormattedValue)
    return constants.get(node.value.id, "…") if isinstance(node.value, ast.Name) else "…"
