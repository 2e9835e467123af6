from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import pytest

from max_build.errors import MaxBuildError
from max_build.key import digest
from max_build.store import CacheSettings, Hit, open_cache
from max_build.testing.store import example

COMMANDS = ("gc", "verify", "stats", "push", "pull", "pack", "unpack", "key", "doctor")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A model repo without units, and its cache with two records."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "demo"\nversion = "1"\n[tool.max-build]\ntargets = ["cpu"]\n'
    )
    for name in ("cache", "remote"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with open_cache(CacheSettings(dir=str(tmp_path / "cache"))) as cache:
        for name in ("one", "two"):
            record = example(name, name.encode() * 100)
            cache.publish(record, {digest(name.encode() * 100): name.encode() * 100})
            cache.lookup(record.key)
    return tmp_path


@pytest.fixture
def run(project, capsys):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-C", "--project", type=Path, default=project)
    commands = parser.add_subparsers()
    for name in COMMANDS:
        importlib.import_module(f"max_build.cli.{name}").register(commands)

    def call(*arguments):
        options = parser.parse_args([str(argument) for argument in arguments])
        status = options.run(options)
        out, _ = capsys.readouterr()
        return status, json.loads(out) if "--json" in arguments else out

    return call


KEYS = {name: example(name, b"").key for name in ("one", "two")}


def test_gc(run):
    status, report = run("gc", "--max-size", "0", "--grace", "0s", "--dry-run", "--json")
    assert (status, report["entries"]) == (0, 2)
    assert "removed 0 entries" in run("gc", "--max-size", "0")[1]


def test_gc_of_any_directory(run, project):
    assert run("gc", "--dir", project / "cache", "--max-age", "1d")[0] == 0
    with pytest.raises(MaxBuildError, match="is not a directory"):
        run("gc", "--dir", project / "nowhere")


def test_gc_of_a_tier_that_is_not_there(run):
    with pytest.raises(MaxBuildError, match="no usable remote cache"):
        run("gc", "--tier", "remote")


def test_gc_pins_by_the_beginning_of_a_key(run, project):
    run("gc", "--pin", KEYS["one"][:12])
    assert [path.name for path in (project / "cache" / "pin").iterdir()] == [KEYS["one"]]
    with pytest.raises(MaxBuildError, match="0 entries"):
        run("gc", "--pin", "zz")


@pytest.mark.parametrize("amount", ["lots", "-1"])
def test_gc_refuses_what_is_no_size(run, amount, capsys):
    with pytest.raises(SystemExit):
        run("gc", f"--max-size={amount}")
    assert "a size is a number" in capsys.readouterr().err


def test_verify(run, project):
    assert run("verify", "--json") == (0, {"entries": 2, "blobs": 2, "findings": []})
    name = digest(b"one" * 100)
    path = project / "cache" / "cas" / name[:2] / name
    path.chmod(0o600)
    path.write_bytes(b"two" * 100)
    status, report = run("verify", "--json")
    assert status == 1
    assert {finding["kind"] for finding in report["findings"]} == {"ac", "cas"}


def test_stats(run):
    status, report = run("stats", "--json")
    assert status == 0
    assert report["ever"]["hits"] == {"local": 2}
    assert "2 hits, 0 misses, 4 s saved" in run("stats")[1]
    assert 'max_build_hits_total{tier="local"} 2' in run("stats", "--prometheus")[1]


def test_push_and_pull(run, project, monkeypatch):
    with pytest.raises(MaxBuildError, match="no remote to pull from"):
        run("pull")
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'remote'}")
    assert run("push", "--json")[0] == 1
    monkeypatch.setenv("MAX_BUILD_REMOTE_MODE", "read-write")
    status, report = run("push", "--unit", "one", "--json")
    assert (status, report["moved"]) == (0, [KEYS["one"]])
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(project / "other"))
    status, report = run("pull", "--json")
    assert (status, report["moved"]) == (0, [KEYS["one"]])
    with open_cache(CacheSettings(dir=str(project / "other"))) as cache:
        assert isinstance(cache.lookup(KEYS["one"]), Hit)


def test_pack_and_unpack(run, project, monkeypatch):
    assert run("pack", "-o", project / "b.tar.zst")[0] == 0
    assert run("pack", "-o", project / "c.tar.zst", "--unit", "none")[0] == 1
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(project / "other"))
    status, report = run("unpack", project / "b.tar.zst", "--json")
    assert (status, report["records"], report["refused"]) == (0, 2, [])
    with pytest.raises(MaxBuildError, match="cannot be read"):
        run("unpack", project / "pyproject.toml")


def test_key(run, project):
    status, line = run("key", "new", "ci", "-o", project / "ci.key")
    assert status == 0
    assert line.startswith("ci:")
    with open_cache(CacheSettings(dir=str(project / "cache"), public_keys=(line.strip(),))):
        pass


def test_doctor(run, project, monkeypatch):
    status, checks = run("doctor", "--json")
    places = {check["place"] for check in checks if check["verdict"] == "ok"}
    assert "local" in places
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'remote'}")
    monkeypatch.setenv("MAX_BUILD_REMOTE_MODE", "read-write")
    texts = [check["text"] for check in run("doctor", "--json")[1] if check["place"] == "remote"]
    assert len(texts) == 3
    assert "holds leases" in texts[2]
    assert not list((project / "remote" / "cas").glob("*/*"))
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'nowhere'}")
    status, text = run("doctor")
    assert status == 1
    assert "does not exist" in text


def test_doctor_says_what_a_dead_remote_needs(run, monkeypatch):
    monkeypatch.setenv("MAX_BUILD_REMOTE", "http://127.0.0.1:9")
    status, text = run("doctor")
    assert status == 1
    assert "is the server up" in text
