from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import toy_repo as toy
from max_build import compilers
from max_build.config import Settings, cache_of, cache_settings, load_settings, oddities, strangers
from max_build.errors import ConfigError
from max_build.pipeline import build
from max_build.schema import TABLES, markdown
from max_build.store import open_cache
from max_build.store.settings import CacheSettings

ROOT = Path(__file__).resolve().parents[1]
GOOD = """
[project]
name = "Toy.Model"
[tool.max-build]
targets = ["cpu", "sm_90a"]
[tool.max-build.graphs.encoder]
entry = "toy.graph:build"
weights = "model.safetensors"
[tool.max-build.kernels.saxpy]
source = "kernels/saxpy.cu"
targets = ["sm_80"]
"""


def settings(
    tmp_path: Path, text: str, environ: dict[str, str] | None = None, **more: object
) -> Settings:
    (tmp_path / "pyproject.toml").write_text(text)
    return load_settings(tmp_path, environ=environ or {}, **more)  # type: ignore[arg-type]


def refused(tmp_path: Path, text: str, **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, text, **more)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_project_is_read(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    found = settings(tmp_path, GOOD)
    assert found.project == "toy-model"
    assert [(unit.name, unit.kind, unit.compiler, unit.targets) for unit in found.units] == [
        ("encoder", "graph", "max", ("cpu", "sm_90a")),
        ("saxpy", "kernel", "cuda", ("sm_80",)),
    ]
    assert found.unit("encoder").declared["weights"] == ("model.safetensors",)
    assert found.unit("encoder").host == "x86-64-v3"
    assert found.python_path == (str(tmp_path / "src"), str(tmp_path))
    assert (found.jobs, found.compile_timeout, found.embed) == (0, 3600.0, True)


def test_every_finding_is_told_at_once_by_its_path(tmp_path: Path) -> None:
    text = """
    [tool.max-build]
    target = ["cpu"]
    targets = ["cpu", "sm_91", "cpu9"]
    jobs = "four"
    compile-timeout = -1
    embed = 1
    [tool.max-build.cache]
    remote-mode = "write"
    max-size = "20 lots"
    [tool.max-build.graphs.encoder]
    entry = "toy.graph"
    [tool.max-build.graphs.decoder]
    entry = "toy.graph:build"
    wieghts = "a"
    host = "x86-64-v9"
    [tool.max-build.graphs.third]
    [tool.max-build.kernels.saxpy]
    source = "saxpy.c"
    [tool.max-build.kernels.axpby]
    targets = []
    """
    told = refused(tmp_path, text)
    for part in (
        "`tool.max-build.target` is unknown: did you mean `targets`?",
        "`tool.max-build.jobs` must be a whole number of at least 0, got string 'four'",
        "`tool.max-build.compile-timeout` must be a positive number of seconds",
        "`tool.max-build.embed` must be a boolean, got integer 1",
        "`tool.max-build.cache.remote-mode` must be one of `read`, `read-write`",
        "`tool.max-build.cache.max-size` must be a size such as",
        "`tool.max-build.graphs.encoder.entry` must be of the form `package.module:function`",
        "`tool.max-build.graphs.decoder.wieghts` is unknown: did you mean `weights`?",
        "`tool.max-build.graphs.third.entry` is missing",
        "`tool.max-build.kernels.saxpy.source` must end in",
        "`tool.max-build.kernels.axpby.source` is missing",
    ):
        assert part in told, told


def test_wrong_targets_and_hosts_are_told_together(tmp_path: Path) -> None:
    text = GOOD.replace('"sm_90a"]', '"sm_91", "sm90a"]\nhost = "pentium"')
    told = refused(tmp_path, text)
    assert "`tool.max-build.targets`: `sm_91` is an unknown target" in told
    assert "did you mean `sm_90a`" in told
    assert "`tool.max-build.graphs.encoder.host` must be one of generic, x86-64" in told


def test_targets_that_units_inherit_are_told_once_where_they_stand(tmp_path: Path) -> None:
    text = """
    [tool.max-build]
    targets = ["cpu", "sm_90a", "sm_91"]
    [tool.max-build.graphs.g]
    entry = "a:b"
    [tool.max-build.kernels.a]
    source = "a.cu"
    [tool.max-build.kernels.b]
    source = "b.ptx"
    """
    told = refused(tmp_path, text)
    units = "`tool.max-build.kernels.a`, `tool.max-build.kernels.b`"
    line = f"`tool.max-build.targets`: {units} cannot be compiled for `cpu`: set `targets` there"
    assert told.count(line) == 1
    assert told.count("`sm_91`") == 1
    assert "it accepts" not in told
    told = refused(tmp_path, text.replace(', "sm_91"', ""), hook={"targets": ["cpu"]})
    assert "`tool.hatch.build.targets.wheel.hooks.max-build.targets`: `tool.max" in told


def test_one_finding_of_a_unit_does_not_hide_the_others(tmp_path: Path) -> None:
    table = """
    [tool.max-build.kernels.k]
    source = "k.cu"
    nmaes = ["k"]
    targets = ["sm_91"]
    options = { extra = ["-I/x"] }
    """
    told = refused(tmp_path, table)
    assert "`tool.max-build.kernels.k.nmaes` is unknown: did you mean `names`" in told
    assert "`tool.max-build.kernels.k.targets`: `sm_91` is an unknown target" in told
    assert "`tool.max-build.kernels.k.options.extra`" in told
    told = refused(tmp_path, table.replace("nmaes = [", "names = [1, "))
    assert "`tool.max-build.kernels.k.names` must be" in told
    assert "`tool.max-build.kernels.k.targets`: `sm_91` is an unknown target" in told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("/srv/team", "must start with one of `s3://`"),
        ("/srv/a team", "did you mean `file:///srv/a%20team`?"),
        ("s3:/team", "must start with one of `s3://`"),
        ("s3://", "names no host or bucket"),
        ("https://:443/x", "names no host or bucket"),
        ("http://[x", "has a host or port that cannot be read"),
        ("http://a:port", "has a host or port that cannot be read"),
        ("file://team/x", "an absolute path, no `?` or `#`: `file:///team/x`"),
        ("file://", "must have three slashes"),
    ],
)
def test_the_form_of_a_remote_is_told_by_its_path(tmp_path: Path, value: str, told: str) -> None:
    said = refused(tmp_path, f"[tool.max-build.cache]\nremote = '{value}'\n")
    assert said.startswith("`tool.max-build.cache.remote` ")
    assert told in said
    with pytest.raises(ConfigError, match="remote cache URL ") as caught:
        open_cache(CacheSettings(dir=str(tmp_path / "cache"), remote=value))
    assert told in str(caught.value)


@pytest.mark.parametrize("url", ["htps://ci:secret@host/x", "ci:secret@host/x", "//ci:secret@h:x"])
def test_no_secret_of_a_remote_is_told(tmp_path: Path, url: str) -> None:
    told = refused(tmp_path, GOOD, environ={"MAX_BUILD_REMOTE": url})
    assert told.startswith("environment variable `MAX_BUILD_REMOTE` ")
    assert "secret" not in told


@pytest.mark.parametrize("url", ["s3://team/x", "file:///srv/x", "http://[::1]:8080", "az://c/p"])
def test_remotes_of_every_form_are_taken(tmp_path: Path, url: str) -> None:
    assert settings(tmp_path, GOOD, {"MAX_BUILD_REMOTE": url}).cache.remote == url


def test_the_form_of_keys_and_executors_is_told_by_their_path(tmp_path: Path) -> None:
    key = "ci:" + "A" * 43 + "="
    text = f"[tool.max-build.cache]\npublic-keys = ['{key}', 'ci:QUJD']\n"
    told = refused(tmp_path, "[tool.max-build]\nexecutor = 'ray://head:1'\n" + text)
    assert "`tool.max-build.executor` must be `local` or `dask://HOST:PORT`, got 'ray:" in told
    assert "`tool.max-build.cache.public-keys` must have `name:base64` of 32 bytes" in told
    assert "item 2 is 'ci:QUJD'" in told
    assert settings(tmp_path, text.replace(", 'ci:QUJD'", "")).cache.public_keys == (key,)


def test_a_units_own_targets_give_way_to_the_variable(tmp_path: Path) -> None:
    found = settings(tmp_path, GOOD, {"MAX_BUILD_TARGETS": "sm_86"})
    assert [unit.targets for unit in found.units] == [("sm_86",), ("sm_86",)]
    found = settings(tmp_path, GOOD, {"MAX_BUILD_TARGETS": "cpu"})
    assert [(unit.name, unit.targets) for unit in found.units] == [("encoder", ("cpu",))]
    told = refused(tmp_path, GOOD, environ={"MAX_BUILD_TARGETS": "sm_91 cpu"})
    assert "environment variable `MAX_BUILD_TARGETS`: `sm_91` is an unknown target" in told


def test_what_is_hardly_meant_is_told_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    text = GOOD.replace("[tool.max-build]\n", "[tool.max-build]\npython-path = ['lib']\n")
    found = settings(tmp_path, text + "include-dirs = ['include', 'inculde']\n")
    assert oddities(found, {"MAX_BUILD_JBOS": "2", "MAX_BUILD_STALE": "warn"}) == [
        "environment variable `MAX_BUILD_JBOS` is unknown: did you mean `MAX_BUILD_JOBS`?",
        f"`tool.max-build.python-path` names `{tmp_path / 'lib'}`, which is no directory",
        "`tool.max-build.kernels.saxpy.include-dirs` names `inculde`, which is no directory",
    ]


def test_every_variable_that_is_read_is_known() -> None:
    text = "".join(path.read_text() for path in (ROOT / "max_build").rglob("*.py"))
    named = set(re.findall(r"\bMAX_BUILD_[A-Z_]*[A-Z]\b", text))
    assert strangers(dict.fromkeys(named, "")) == []


def test_the_users_file_is_told_by_its_name(tmp_path: Path) -> None:
    user = tmp_path / "config" / "max-build" / "config.toml"
    user.parent.mkdir(parents=True)
    user.write_text("jobs = 'two'\n[cache]\nremot = 's3://x'\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    told = refused(tmp_path, GOOD, environ=environ)
    assert f"`{user}: jobs` must be a whole number" in told
    assert f"`{user}: cache.remot` is unknown: did you mean `remote`" in told
    assert told.startswith(f"settings of `{tmp_path / 'pyproject.toml'}` are wrong:\n")
    with pytest.raises(ConfigError, match=r"cache\.remot` is unknown"):
        cache_settings(environ)


def test_a_unit_without_targets_is_an_error(tmp_path: Path) -> None:
    told = refused(tmp_path, '[tool.max-build.graphs.encoder]\nentry = "a:b"\n')
    assert "`tool.max-build.graphs.encoder` has no targets: set `targets`" in told


@pytest.mark.parametrize(
    ("table", "compiler", "fitting"),
    [
        ('kernels.k]\nsource = "k.cu"', "max", "`cuda`, `ptx`, `triton`"),
        ("kernels.k]", "max", "`cuda`, `ptx`, `triton`"),
        ('graphs.g]\nentry = "a:b"', "cuda", "`max`"),
        ('graphs.g]\nentry = "a:b"', "triton", "`max`"),
    ],
)
def test_a_compiler_of_the_other_kind_of_unit(
    tmp_path: Path, table: str, compiler: str, fitting: str
) -> None:
    text = f'[tool.max-build]\ntargets = ["sm_80"]\n[tool.max-build.{table}\n'
    told = refused(tmp_path, f'{text}compiler = "{compiler}"\n')
    where = table.partition("]")[0]
    assert f"`tool.max-build.{where}.compiler` must be one of {fitting}, got '{compiler}'" in told


def test_an_adapter_that_names_no_kinds_takes_both() -> None:
    class Adapter:
        name = "other"

    assert all(compilers.takes(Adapter(), kind) for kind in ("graph", "kernel"))  # type: ignore[arg-type]


def test_endless_numbers_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    text = """
    [tool.max-build]
    targets = ["sm_80"]
    [tool.max-build.graphs.g]
    entry = "a:b"
    options = { defines = { SCALE = nan } }
    [tool.max-build.kernels.k]
    entry = "a:k"
    constexprs = { LOW = -inf, FINE = 1e300 }
    specialisations = { wide = { constexprs = { HIGH = inf } } }
    options = { list = [0.5, { x = +inf }] }
    """
    told = refused(tmp_path, text)
    for part in (
        "`tool.max-build.graphs.g.options.defines.SCALE` must be a finite number, got nan",
        "`tool.max-build.kernels.k.constexprs.LOW` must be a finite number, got -inf",
        "`tool.max-build.kernels.k.specialisations.wide.constexprs.HIGH` must be a finite number",
        "`tool.max-build.kernels.k.options.list[1].x` must be a finite number, got inf",
    ):
        assert part in told, told
    assert "FINE" not in told


def test_a_directory_or_variable_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    root.mkdir()
    told = refused(root, GOOD)
    assert r"/caf\xe9` has a path that is not UTF-8" in told
    told.encode()
    told = refused(tmp_path, GOOD, environ={"MAX_BUILD_REMOTE": os.fsdecode(b"s3://\xe9")})
    assert "environment variable `MAX_BUILD_REMOTE` is not UTF-8" in told


def test_a_failure_told_in_bytes_that_are_not_utf8_reaches_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.install(tmp_path / "site", monkeypatch)
    unit = r"""
    def build(target):
        raise OSError("no file `caf\udce9`")
    """
    project = load_settings(toy.write_project(tmp_path / "repo", unit=unit))
    with open_cache(project.cache) as cache:
        (outcome,) = build(project, cache).outcomes
    assert outcome.error is not None
    assert outcome.error.message == r"OSError: no file `caf\udce9`"


def test_two_units_cannot_share_a_name(tmp_path: Path) -> None:
    text = GOOD.replace("kernels.saxpy", "kernels.encoder")
    told = refused(tmp_path, text)
    assert (
        "`tool.max-build.kernels.encoder` has the name of `tool.max-build.graphs.encoder`" in told
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[tool]\nmax-build = 1\n", "`tool.max-build` must be a table"),
        ("[tool.max-build]\ngraphs = []\n", "`tool.max-build.graphs` must be a table"),
        ("[tool.max-build.graphs]\na = 1\n", "`tool.max-build.graphs.a` must be a table"),
        ("[tool.max-build.graphs.\"a b\"]\nentry='a:b'\n", "a unit's name is made of letters"),
        ("[tool.max-build]\ntargets = ['cpu', 'cpu']\n", "names `cpu` twice"),
        ("[tool.max-build]\ntargets = [1]\n", "item 1 is 1"),
        ("[tool.max-build\n", "cannot be read"),
    ],
)
def test_malformed_tables(tmp_path: Path, text: str, part: str) -> None:
    assert part in refused(tmp_path, text)


def test_no_project_is_told_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no `pyproject.toml`(.|\n)*--project DIR"):
        load_settings(tmp_path, environ={})


def test_precedence(tmp_path: Path) -> None:
    user = tmp_path / "config" / "max-build"
    user.mkdir(parents=True)
    (user / "config.toml").write_text('jobs = 1\n[cache]\ndir = "/user"\nremote = "s3://u"\n')
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    text = GOOD + "[tool.max-build.cache]\nremote = 's3://p'\n"
    assert settings(tmp_path, text, environ).cache.remote == "s3://p"
    assert settings(tmp_path, text, environ).cache.dir == "/user"
    assert settings(tmp_path, text, environ).jobs == 1
    hook = {"jobs": 2, "dependencies": [], "enable-by-default": True}
    assert settings(tmp_path, text, environ, hook=hook).jobs == 2
    environ["MAX_BUILD_JOBS"] = "3"
    assert settings(tmp_path, text, environ, hook=hook).jobs == 3
    assert settings(tmp_path, text, environ, hook=hook, flags={"jobs": 4}).jobs == 4
    environ["MAX_BUILD_REMOTE"] = "s3://e"
    assert settings(tmp_path, text, environ).cache.remote == "s3://e"
    assert cache_settings(environ).remote == "s3://e"
    assert cache_settings(environ).dir == "/user"


def test_variables_are_converted_and_wrong_ones_told_by_name(tmp_path: Path) -> None:
    environ = {
        "MAX_BUILD_TARGETS": "cpu, sm_80",
        "MAX_BUILD_REQUIRE_HIT": "1",
        "MAX_BUILD_MAX_SIZE": "1.5 GiB",
        "MAX_BUILD_COMPILE_TIMEOUT": "12.5",
    }
    found = settings(tmp_path, GOOD, environ)
    assert found.unit("encoder").targets == ("cpu", "sm_80")
    assert found.unit("saxpy").targets == ("sm_80",)
    assert found.require_hit
    assert found.cache.max_size == 3 << 29
    assert found.compile_timeout == 12.5
    bad = {"MAX_BUILD_JOBS": "many", "MAX_BUILD_EMBED": "perhaps", "MAX_BUILD_REMOTE_MODE": "w"}
    told = refused(tmp_path, GOOD, environ=bad)
    assert "environment variable `MAX_BUILD_JOBS` must be a number, got 'many'" in told
    assert "environment variable `MAX_BUILD_EMBED` must be `1` or `0`, got 'perhaps'" in told
    half = refused(tmp_path, GOOD, environ={"MAX_BUILD_JOBS": "1.5"})
    assert "`MAX_BUILD_JOBS` must be a whole number of at least 0, got float 1.5" in half
    assert "environment variable `MAX_BUILD_REMOTE_MODE` must be one of" in told


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    assert settings(tmp_path, GOOD, {"MAX_BUILD_JOBS": ""}).jobs == 0


def test_the_hooks_own_table_is_checked_under_its_own_path(tmp_path: Path) -> None:
    told = refused(tmp_path, GOOD, hook={"jbos": 2})
    assert "`tool.hatch.build.targets.wheel.hooks.max-build.jbos` is unknown" in told


def test_the_user_file_may_not_hold_a_projects_settings(tmp_path: Path) -> None:
    user = tmp_path / "config" / "max-build"
    user.mkdir(parents=True)
    (user / "config.toml").write_text('targets = ["cpu"]\n')
    told = refused(tmp_path, GOOD, environ={"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert "may set `cache`" in told
    assert "not `targets`" in told


def test_narrowing_to_units_and_targets(tmp_path: Path) -> None:
    found = settings(tmp_path, GOOD)
    assert [one.name for one in found.narrowed(("saxpy",), ()).units] == ["saxpy"]
    narrowed = found.narrowed((), ("cpu",))
    assert [(one.name, one.targets) for one in narrowed.units] == [("encoder", ("cpu",))]
    with pytest.raises(ConfigError, match="`cpu` is not a target of this compiler"):
        found.narrowed(("saxpy",), ("cpu",))
    with pytest.raises(ConfigError, match="`sm_91` is an unknown target"):
        found.narrowed((), ("cpu", "sm_91"))
    with pytest.raises(ConfigError, match=r"no unit `saxpi`(.|\n)*did you mean `saxpy`"):
        found.narrowed(("saxpi",), ())


def test_relative_cache_directories_are_the_projects(tmp_path: Path) -> None:
    text = GOOD + "[tool.max-build.cache]\ndir = '.cache'\n"
    assert settings(tmp_path, text).cache.dir == str(tmp_path / ".cache")


def test_the_cache_is_the_projects_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_BUILD_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert cache_of(None) == cache_of(tmp_path) == cache_settings()
    settings(tmp_path, GOOD + '[tool.max-build.cache]\nshared = "team"\n')
    assert cache_of(tmp_path).shared == str(tmp_path / "team")
    assert cache_of(tmp_path).dir == str(tmp_path / "own")


def test_the_readme_has_the_table_that_the_code_decodes_by() -> None:
    assert markdown() in (ROOT / "README.md").read_text()


def test_every_setting_has_a_meaning_and_variables_are_unique() -> None:
    fields = [field for table in TABLES.values() for field in table]
    assert all(field.doc for field in fields)
    variables = [field.env for field in fields if field.env]
    assert len(set(variables)) == len(variables)
    assert all(re.fullmatch(r"MAX_BUILD_[A-Z_]+", name) for name in variables)


def test_every_setting_of_the_cache_can_be_set() -> None:
    known = {field.name.replace("-", "_") for field in TABLES["tool.max-build.cache"]}
    assert known == set(CacheSettings.__struct_fields__)


@pytest.mark.parametrize("name", ["MODULAR_X", "TRITON_X", "XDG_CACHE_HOME", "HOME"])
def test_a_variable_that_goes_into_keys_or_paths_has_to_be_utf8(tmp_path: Path, name: str) -> None:
    told = refused(tmp_path, GOOD, environ={name: "/caf\udce9"})
    assert f"environment variable `{name}` is not UTF-8" in told
