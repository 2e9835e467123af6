from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import msgspec
import pytest

import toy_repo
from max_build import manifest as manifests
from max_build.errors import MaxBuildError
from max_build.key import digest
from max_build.manifest import ManifestUnit
from max_build.store import CacheSettings, Hit, open_cache
from max_build.store.doctor import examine, specific
from max_build.testing.store import example
from support import max_build

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

    call.parser = parser
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


def test_gc_refuses_a_folder_that_is_no_cache(run, project):
    with pytest.raises(MaxBuildError, match=f"`{project}` is no cache") as caught:
        run("gc", "--dir", project)  # one level too high
    assert "CACHEDIR.TAG" in caught.value.hint
    (project / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
    with pytest.raises(MaxBuildError, match="is no cache"):
        run("gc", "--dir", project)  # another program's


def test_gc_tells_of_leftovers(run, project):
    left = project / "cache" / "tmp" / ("0" * 16)
    left.write_text("")
    os.utime(left, (1, 1))
    assert "would remove 1 old file of interrupted" in run("gc", "-n")[1]
    assert run("gc", "--json")[1]["leftovers"] == 1


def test_gc_of_a_tier_that_is_only_read_says_what_to_set(run, project, monkeypatch):
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'remote'}")
    with pytest.raises(MaxBuildError, match="read-only") as caught:
        run("gc", "--tier", "remote")
    assert "MAX_BUILD_REMOTE_MODE=read-write" in caught.value.hint


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
    for command, way in (("pull", "from"), ("push", "to")):
        with pytest.raises(MaxBuildError, match=f"no remote to {command} {way}"):
            run(command)
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'remote'}")
    with pytest.raises(MaxBuildError, match="may only read the remote"):
        run("push")
    monkeypatch.setenv("MAX_BUILD_REMOTE_MODE", "read-write")
    status, report = run("push", "--unit", "one", "--json")
    assert (status, report["moved"]) == (0, [KEYS["one"]])
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(project / "other"))
    status, report = run("pull", "--json")
    assert (status, report["moved"]) == (0, [KEYS["one"]])
    with open_cache(CacheSettings(dir=str(project / "other"))) as cache:
        assert isinstance(cache.lookup(KEYS["one"]), Hit)


def test_a_reason_of_many_keys_is_told_once(run, project, monkeypatch, capsys):
    shutil.rmtree(project / "remote")
    (project / "remote").mkdir()
    (project / "remote" / "ac").write_text("")
    (project / "remote" / "cas").write_text("")
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'remote'}")
    monkeypatch.setenv("MAX_BUILD_REMOTE_MODE", "read-write")
    options = run.parser.parse_args(["push"])
    assert options.run(options) == 1
    told = capsys.readouterr().err
    assert told.count("the remote cache did not take it") == 1
    assert " and 1 other: " in told


def test_a_key_that_nothing_fits_is_told(run, project, monkeypatch):
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'remote'}")
    monkeypatch.setenv("MAX_BUILD_REMOTE_MODE", "read-write")
    status, report = run("push", KEYS["one"][:9], "0" * 64, "--json")
    assert (status, report["moved"], list(report["failed"])) == (1, [KEYS["one"]], ["0" * 64])
    status, report = run("pull", KEYS["one"], "0" * 64, "zz", "--json")
    assert (status, report["moved"]) == (1, [KEYS["one"]])
    assert report["failed"] == {"0" * 64: "no tier has it", "zz": "nothing out there fits"}
    monkeypatch.setenv("MAX_BUILD_REMOTE", "http://127.0.0.1:9")
    status, report = run("pull", "0" * 64, "--json")
    assert (status, "no connection" in report["failed"]["0" * 64]) == (1, True)
    with pytest.raises(MaxBuildError, match="zz: nothing here fits"):
        run("pack", "zz", "-o", project / "b.tar.zst")


def lock_of(path, *records):
    """A lock of records, one unit each."""
    units = [(r.unit, ManifestUnit(kind="graph", targets={"cpu": r})) for r in records]
    path.write_bytes(manifests.encode(manifests.make("demo", units, embedded=False)))
    return path


def test_a_lock_chooses_what_is_moved(run, project, monkeypatch):
    one, two = (example(name, name.encode() * 100) for name in ("one", "two"))
    lock = lock_of(project / "lock", one, two)
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'remote'}")
    monkeypatch.setenv("MAX_BUILD_REMOTE_MODE", "read-write")
    assert run("push", "--lock", lock, "--unit", "two", "--json")[1]["moved"] == [two.key]
    assert run("push", "--lock", lock, "--json")[0] == 0
    assert run("pack", "--lock", lock, "-t", "cpu", "-o", project / "b.tar.zst")[0] == 0
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(project / "other"))
    with zipfile.ZipFile(project / "demo.whl", "w") as wheel:
        wheel.write(lock, "demo-1.dist-info/extra_metadata/max-build/manifest.json")
    status, report = run("pull", "--lock", project / "demo.whl", "--json")
    assert (status, sorted(report["moved"])) == (0, sorted([one.key, two.key]))
    with open_cache(CacheSettings(dir=str(project / "other"))) as cache:
        assert cache.lookup(two.key) == Hit(two, "local")


def test_what_a_lock_names_and_no_tier_has_is_told(run, project, monkeypatch):
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'remote'}")
    monkeypatch.setenv("MAX_BUILD_REMOTE_MODE", "read-write")
    one, gone = example("one", b"one" * 100), example("gone", b"gone")
    lock = lock_of(project / "lock", one, gone)
    for command in ("push", "pull"):
        status, report = run(command, "--lock", lock, "--json")
        assert (status, report["moved"], list(report["failed"])) == (1, [one.key], [gone.key])
    with pytest.raises(MaxBuildError, match=gone.key):
        run("pack", "--lock", lock, "-o", project / "b.tar.zst")
    assert not (project / "b.tar.zst").exists()


def test_another_compile_of_a_key_is_not_what_a_lock_names(run, project, monkeypatch):
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'remote'}")
    monkeypatch.setenv("MAX_BUILD_REMOTE_MODE", "read-write")
    other = example("one", b"compiled elsewhere")
    lock = lock_of(project / "lock", other)
    status, report = run("push", "--lock", lock, "--json")
    assert (status, "another compile" in report["failed"][other.key]) == (1, True)
    status, report = run("pull", "--lock", lock, "--json")
    assert (status, "another compile" in report["failed"][other.key]) == (1, True)
    # Where a tier has those bytes after all, they come too.
    with open_cache(CacheSettings(dir=str(project / "elsewhere"))) as cache:
        cache.publish(other, {digest(b"compiled elsewhere"): b"compiled elsewhere"})
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(project / "elsewhere"))
    assert run("push", "--lock", lock, "--json")[0] == 0
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(project / "cache"))
    assert run("pull", "--lock", lock, "--json")[0] == 0


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[]", "is damaged"),
        (b'{"schema":9}', "has schema 9"),
        (b'{"schema":1,"package":"x","embedded":false,"units":{}}', "names nothing that fits"),
        ("altered key", "is not its own"),
        ("path for a digest", "is damaged"),
        ("wheel without", "carries no manifest"),
        ("cut wheel", "cannot be read"),
        ("wheel with less than it says", "cannot be read"),
    ],
)
def test_what_is_no_lock_is_told(run, project, monkeypatch, content, told):
    monkeypatch.setenv("MAX_BUILD_REMOTE", f"file://{project / 'remote'}")
    record, path = example("one", b"one" * 100), project / "lock"
    if content == "altered key":
        lock_of(path, msgspec.structs.replace(record, key="0" * 64))
    elif content == "path for a digest":
        lock_of(path, record)
        name = record.blobs[0].digest.encode()
        path.write_bytes(path.read_bytes().replace(name, b"../../../pyproject.toml"))
    elif isinstance(content, str):
        packed = zipfile.ZIP_DEFLATED if content == "cut wheel" else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", packed) as wheel:
            inside = "demo/x.py" if content == "wheel without" else "demo/_max_build/manifest.json"
            wheel.writestr(inside, os.urandom(100))
        data = bytearray(path.read_bytes())
        if content == "cut wheel":
            data[60:120] = bytes(60)
        elif content == "wheel with less than it says":
            sizes = data.index(b"PK\1\2") + 20
            data[sizes : sizes + 8] = b"\0\0\xff\0" * 2
        path.write_bytes(data)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(MaxBuildError, match=told) as caught:
        run("pull", "--lock", path)
    assert caught.value.hint


def test_a_build_writes_a_lock_that_fills_a_machine_without_compiler_or_project(
    tmp_path, monkeypatch
):
    """CI builds and notes what it built; a machine with nothing but that file fetches it."""
    (tmp_path / "remote").mkdir(mode=0o700)
    remote = {"MAX_BUILD_REMOTE": f"file://{tmp_path / 'remote'}"}
    site = toy_repo.write_compiler(tmp_path / "site")
    source = "def build(target):\n    return 'ir of a graph'\n"
    repo = toy_repo.write_project(tmp_path / "repo", unit=source)
    lock, other = tmp_path / "max-build.lock", tmp_path / "max-build.lock.tmp"
    other.write_bytes(b"not ours")  # as another build might call what it is about to put there
    written = set()
    for machine in ("ci", "other"):
        env = {
            **remote,
            "MAX_BUILD_REMOTE_MODE": "read-write",
            "MAX_BUILD_CACHE_DIR": tmp_path / machine,
            "PYTHONPATH": site,
        }
        done = max_build("build", "--lock", str(lock), cwd=repo, env=env)
        assert done.returncode == 0, done.stderr
        written.add(lock.read_bytes())
    assert len(written) == 1
    assert other.read_bytes() == b"not ours"
    assert str(tmp_path) not in lock.read_text()
    env = {**remote, "MAX_BUILD_CACHE_DIR": tmp_path / "server", "PYTHONPATH": None}
    (tmp_path / "empty").mkdir()
    done = max_build("pull", "--lock", str(lock), "--json", cwd=tmp_path / "empty", env=env)
    assert done.returncode == 0, done.stderr
    (key,) = json.loads(done.stdout)["moved"]
    with open_cache(CacheSettings(dir=str(tmp_path / "server"))) as cache:
        found = cache.lookup(key)
        assert isinstance(found, Hit)
        assert cache.path(found.record.blobs[0]).read_bytes() == b"ir of a graph"
    env = {**remote, "MAX_BUILD_CACHE_DIR": tmp_path / "ci", "PYTHONPATH": site}
    for place in (tmp_path / "nowhere" / "lock", lock / "below", Path(".")):
        done = max_build("build", "--lock", str(place), cwd=repo, env=env)
        assert done.returncode == 1
        assert f"lock `{place}` cannot be written" in done.stderr


def test_pack_and_unpack(run, project, monkeypatch):
    assert run("pack", "-o", project / "b.tar.zst")[0] == 0
    assert run("pack", "-o", project / "c.tar.zst", "--unit", "none")[0] == 1
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(project / "other"))
    status, report = run("unpack", project / "b.tar.zst", "--json")
    assert (status, report["entries"], report["refused"]) == (0, 2, [])
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


def test_doctor_says_one_thing_of_a_tier_that_was_left_out(run, project, monkeypatch):
    monkeypatch.setenv("MAX_BUILD_SHARED", str(project / "nowhere"))
    assert "nothing is shared" not in run("doctor")[1]
    monkeypatch.delenv("MAX_BUILD_SHARED")
    assert "nothing is shared" in run("doctor")[1]


def test_doctor_says_where_rights_are_missing(project):
    (project / "remote").chmod(0o755)
    settings = CacheSettings(dir=str(project / "cache"), shared=str(project / "remote"))
    with open_cache(settings) as cache:
        cache.outer[0].store.writable = False  # as for a user without the right
        (check,) = [one for one in examine(cache) if one.verdict == "note"]
    assert (check.place, "in its group" in check.fix) == ("shared", True)


@pytest.mark.parametrize(
    ("url", "message", "told"),
    [
        ("https://h", "failed: SSL, self-signed certificate", "remote-ca"),
        ("https://h", "failed: SSL, unable to get local issuer certificate", "remote-ca"),
        ("https://h", "failed: SSL, WRONG_VERSION_NUMBER", "`http://`"),
        ("http://h", "GET ac/0 gave status 400", "`https://`"),
        ("http://h", "GET ac/0 failed: ProtocolError", "`https://`"),
        ("s3://b", "PUT http://169.254.169.254/latest/api/token: 403", "AWS_ACCESS_KEY_ID"),
        ("s3://b", "remote cache did not answer for 2.0 s", "AWS_ACCESS_KEY_ID"),
        ("gs://b", "GET http://169.254.169.254/computeMetadata", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("https://h", "gave status 500", ""),
        ("http://h", "remote cache did not answer for 2.0 s", ""),
    ],
)
def test_doctor_knows_what_mends_it(monkeypatch, tmp_path, url, message, told):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    assert told in specific(url, message)
    assert bool(told) == bool(specific(url, message))


def test_doctor_says_what_a_dead_remote_needs(run, monkeypatch):
    monkeypatch.setenv("MAX_BUILD_REMOTE", "http://127.0.0.1:9")
    status, text = run("doctor")
    assert status == 1
    assert "is the server up" in text
