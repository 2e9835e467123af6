"""A project's sources as one blob."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from max_build.cluster import snapshot
from max_build.cluster.snapshot import pack, unpack
from max_build.errors import ConfigError
from max_build.key import digest


def repo(root: Path) -> Path:
    for name, text in {
        "pyproject.toml": "[project]\n",
        "src/toy/graph.py": "x = 1\n",
        "src/toy/empty.py": "",
        "kernels/deep/k.cu": "// é\n",
        ".git/HEAD": "ref",
        ".venv/pyvenv.cfg": "",
        "env/pyvenv.cfg": "",
        "env/lib/site.py": "",
        "build/old.o": "",
        "dist/old.whl": "",
        "src/toy/__pycache__/graph.pyc": "",
        "toy.egg-info/PKG-INFO": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    with (root / "model.safetensors").open("wb") as file:
        file.truncate(snapshot.FILE_LIMIT)
    return root


def test_sources_travel_and_the_rest_stays(tmp_path: Path) -> None:
    root = repo(tmp_path / "repo")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    blob = pack(root, tmp_path / "a.tar")
    data = (tmp_path / "a.tar").read_bytes()
    assert (blob.digest, blob.size) == (digest(data), len(data))
    unpack(tmp_path / "a.tar", tmp_path / "there")
    found = sorted(
        p.relative_to(tmp_path / "there").as_posix() for p in (tmp_path / "there").rglob("*.*")
    )
    assert found == [
        "kernels/deep/k.cu",
        "pyproject.toml",
        "run.sh",
        "src/toy/empty.py",
        "src/toy/graph.py",
    ]
    assert (tmp_path / "there/kernels/deep/k.cu").read_text() == "// é\n"
    assert os.access(tmp_path / "there/run.sh", os.X_OK)


def test_the_same_files_are_the_same_blob_wherever_and_whenever(tmp_path: Path) -> None:
    first = pack(repo(tmp_path / "one"), tmp_path / "a.tar")
    other = repo(tmp_path / "elsewhere" / "two")
    os.utime(other / "pyproject.toml", (1, 1))
    (other / "pyproject.toml").chmod(0o600)
    os.link(other / "src/toy/graph.py", tmp_path / "linked")
    assert pack(other, tmp_path / "b.tar") == first
    (other / "src/toy/graph.py").write_text("x = 2\n")
    assert pack(other, tmp_path / "c.tar") != first


def test_links_inside_travel_and_links_outside_stay(tmp_path: Path) -> None:
    root = repo(tmp_path / "repo")
    (root / "src/alias").symlink_to("toy")
    (root / "graph.py").symlink_to(root / "src/toy/graph.py")
    (root / "secret").symlink_to("/etc/passwd")
    pack(root, tmp_path / "a.tar")
    unpack(tmp_path / "a.tar", tmp_path / "there")
    assert (tmp_path / "there/src/alias/graph.py").read_text() == "x = 1\n"
    assert os.readlink(tmp_path / "there/graph.py") == "src/toy/graph.py"
    assert not (tmp_path / "there/secret").is_symlink()


def test_secrets_and_hidden_files_stay(tmp_path: Path) -> None:
    root = repo(tmp_path / "repo")
    before = pack(root, tmp_path / "a.tar")
    (root / ".env").write_text("TOKEN=1\n")
    (root / "src/toy/.netrc").write_text("password\n")
    (root / ".link").symlink_to("pyproject.toml")
    for kind in ("", "RSA ", "OPENSSH ", "ENCRYPTED "):
        (root / f"{kind.strip()}key").write_text(f"-----BEGIN {kind}PRIVATE KEY-----\n")
    assert pack(root, tmp_path / "b.tar") == before
    (root / "public").write_text("-----BEGIN PUBLIC KEY-----\n")
    assert pack(root, tmp_path / "c.tar") != before


def test_a_link_that_leads_to_itself_stays(tmp_path: Path) -> None:
    root = repo(tmp_path / "repo")
    before = pack(root, tmp_path / "a.tar")
    (root / "loop").symlink_to("loop")
    (root / "there").symlink_to("back")
    (root / "back").symlink_to("there")
    assert pack(root, tmp_path / "b.tar") == before


@pytest.mark.parametrize("name", ["../out.py", "a/../../out.py", "link/out.py"])
def test_nothing_lands_outside(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, ".."
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(tarfile.TarError):
        unpack(tmp_path / "bad.tar", tmp_path / "there")
    assert not list(tmp_path.rglob("out.py"))


def test_too_much_is_an_error_that_names_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = repo(tmp_path / "repo")
    (root / "data.bin").write_bytes(bytes(5000))
    monkeypatch.setattr(snapshot, "_LIMIT", 4000)
    with pytest.raises(ConfigError, match=r"5\.0 kB of sources, too much") as error:
        pack(root, tmp_path / "a.tar")
    assert "`data.bin`" in error.value.hint
