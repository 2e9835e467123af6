"""Getting at the HTTP cache: client certificates, credentials, proxies."""

from __future__ import annotations

import os

import cache_servers
import pytest

from max_build.errors import StoreError
from max_build.key import digest
from max_build.record import encode
from max_build.store import CacheSettings, Hit, Miss, open_cache
from max_build.store.connection import authorization
from max_build.store.entry import seal
from max_build.store.http import HttpStore
from max_build.testing.store import example

ARTIFACT = os.urandom(300_000)
RECORD = example("unit", ARTIFACT)
ENTRY = seal(encode(RECORD))
CONTENT = {digest(ARTIFACT): ARTIFACT}


def opened(folder, url, **options):
    return open_cache(CacheSettings(dir=str(folder), remote=url, **options))


def publish(folder, url, **options):
    with opened(folder, url, remote_mode="read-write", **options) as cache:
        cache.publish(RECORD, CONTENT)
        assert cache.warnings == []


def faulty(folder, url, **options):
    """The kind of fault and the warning of a build whose remote cannot be used, yet goes on."""
    with opened(folder, url, remote_mode="read-write", **options) as cache:
        for name in ("unit", "other", "third", "fourth"):
            record = example(name, ARTIFACT)
            assert isinstance(cache.lookup(record.key), Miss)
            cache.publish(record, CONTENT)
            assert isinstance(cache.lookup(record.key), Hit)
        kinds = {kind for tier, kind in cache.stats.faults if tier == "remote"}
        return kinds, "\n".join(cache.warnings)


# --- client certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, a client that it signed, and one that another did."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "other"):
        cache_servers.certificate(folder, name)
    for name, authority in (("localhost", "ca"), ("alice", "ca"), ("mallory", "other")):
        cache_servers.certificate(folder, name, authority)
    cache_servers.certificate(folder, "locked", "ca", passphrase="geheim")
    return folder


@pytest.fixture(scope="module")
def demanding(certificates, tmp_path_factory):
    """The server of `cache/`, for clients with a certificate of the team's authority alone."""
    if cache_servers.program("nginx") is None:
        pytest.skip("`nginx` is not installed (Debian: nginx-light)")
    lines = f"ssl_client_certificate {certificates / 'ca.pem'}; ssl_verify_client on;"
    with cache_servers.nginx(tmp_path_factory.mktemp("nginx"), lines) as server:
        yield server


def tls(demanding, certificates, name="", key=""):
    options = {"remote_ca": str(demanding.certificate)}
    if name:
        options["remote_cert"] = str(certificates / f"{name}.pem")
        options["remote_key"] = str(certificates / f"{key or name}.key")
    return options


def test_a_client_certificate_opens_the_server(demanding, certificates, tmp_path):
    writer = demanding.tls_url.replace("://", f"://{demanding.user}:{demanding.password}@")
    options = tls(demanding, certificates, "alice")
    publish(tmp_path / "a", writer, **options)
    with opened(tmp_path / "b", demanding.tls_url, **options) as cache:
        assert cache.lookup(RECORD.key) == Hit(RECORD, "remote")
        assert cache.warnings == []
    both = tmp_path / "both.pem"
    both.write_bytes(
        b"".join((certificates / f"alice.{kind}").read_bytes() for kind in ("pem", "key"))
    )
    one_file = {"remote_ca": options["remote_ca"], "remote_cert": str(both)}
    with opened(tmp_path / "c", demanding.tls_url, **one_file) as cache:
        assert cache.lookup(RECORD.key) == Hit(RECORD, "remote")


@pytest.mark.parametrize("name", ["", "mallory"])
def test_without_the_right_certificate_a_build_goes_on(demanding, certificates, tmp_path, name):
    kinds, warning = faulty(tmp_path, demanding.tls_url, **tls(demanding, certificates, name))
    assert "permission" in kinds
    assert "wants a client certificate it trusts (`remote-cert`)" in warning


@pytest.mark.parametrize("name", ["", "mallory"])
def test_a_server_that_breaks_the_handshake_off_says_the_same(certificates, tmp_path, name):
    """nginx refuses by a status; most others, bazel-remote too, by an alert."""
    (port,) = cache_servers.free_ports()
    log = tmp_path / "log"
    command = (
        f"openssl s_server -accept {port} -WWW -Verify 1 -verify_return_error -CAfile ca.pem "
        "-cert localhost.pem -key localhost.key"
    )
    options = {"remote_ca": str(certificates / "ca.pem")}
    if name:
        options["remote_cert"] = str(certificates / f"{name}.pem")
        options["remote_key"] = str(certificates / f"{name}.key")
    with cache_servers.running(command.split(), log, cwd=certificates) as process:
        cache_servers.wait_for(lambda: not cache_servers._free(port), log, process)
        store = HttpStore(f"https://localhost:{port}", CacheSettings(**options))
        with pytest.raises(StoreError, match="wants a client certificate") as caught:
            store.get_entry(RECORD.key)
        assert caught.value.kind == "permission"


@pytest.mark.parametrize("damage", ["gone", "no pem", "another's key", "passphrase", "ca gone"])
def test_a_tls_file_of_no_use_is_named_and_a_build_goes_on(
    demanding, certificates, tmp_path, damage
):
    options = tls(demanding, certificates, "alice")
    if damage == "gone":
        options["remote_cert"] = str(tmp_path / "none.pem")
    elif damage == "no pem":
        (tmp_path / "none.pem").write_text("hello")
        options["remote_cert"] = str(tmp_path / "none.pem")
    elif damage == "another's key":
        options = tls(demanding, certificates, "alice", "mallory")
    elif damage == "passphrase":
        options = tls(demanding, certificates, "locked")
    else:
        options["remote_ca"] = str(tmp_path / "none.pem")
    kinds, warning = faulty(tmp_path / "c", demanding.tls_url, **options)
    assert kinds == {"io"}
    assert "TLS files of the remote cache" in warning
    for name in ("remote_ca", "remote_cert", "remote_key"):
        assert options[name] in warning


# --- credentials


def test_credentials_from_netrc(nginx):
    netrc = os.environ["NETRC"]
    with open(netrc, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(f"machine 127.0.0.1 login {nginx.user} password {nginx.password}\n")
    store = HttpStore(nginx.url, writable=True)
    assert store.put_entry(RECORD.key, ENTRY)
    assert store.get_entry(RECORD.key) == ENTRY
    with open(netrc, "w") as file:
        file.write(f"machine 127.0.0.1 login {nginx.user} password geheim\n")
    with pytest.raises(StoreError, match="401") as caught:
        HttpStore(nginx.url, writable=True).put_entry(RECORD.key, ENTRY, replace=True)
    assert caught.value.kind == "permission"
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("token", ["geheim\n", " geheim"])
def test_space_around_a_token_is_none_of_it(monkeypatch, token):
    monkeypatch.setenv("MAX_BUILD_REMOTE_TOKEN", token)
    assert authorization("http://localhost/") == {"Authorization": "Bearer geheim"}


@pytest.mark.parametrize("token", ["geheim\nX-Other: 1", "gehéim", "geheim\udcff", "geheim€"])
def test_a_token_that_no_header_can_hold_is_not_used_and_not_shown(tmp_path, monkeypatch, token):
    monkeypatch.setenv("MAX_BUILD_REMOTE_TOKEN", token)
    with opened(tmp_path, "http://localhost/") as cache:
        (warning,) = cache.warnings
        assert cache.outer == ()
    assert "left out: `MAX_BUILD_REMOTE_TOKEN` holds a character that is not" in warning
    assert "geh" not in warning


def test_a_netrc_that_is_no_text_is_as_none(tmp_path, monkeypatch):
    netrc = tmp_path / "netrc"
    netrc.write_bytes(b"machine localhost login \xff\xfe password geheim\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert authorization("http://localhost/") == {}


def test_a_token_is_sent_as_bearer(tmp_path, monkeypatch):
    if cache_servers.program("nginx") is None:
        pytest.skip("`nginx` is not installed (Debian: nginx-light)")
    lines = """if ($http_authorization = "Bearer geheim") { set $known yes; }
    if ($uri = "/health") { set $known yes; }
    if ($known != yes) { return 403; }"""
    with cache_servers.nginx(tmp_path, lines) as server:
        with pytest.raises(StoreError, match="403") as caught:
            HttpStore(server.url).get_entry(RECORD.key)
        assert caught.value.kind == "permission"
        monkeypatch.setenv("MAX_BUILD_REMOTE_TOKEN", "geheim")
        assert HttpStore(server.url).get_entry(RECORD.key) is None
        # What the URL says goes first.
        with pytest.raises(StoreError, match="403"):
            HttpStore(server.writer_url).get_entry(RECORD.key)


def test_below_a_path_of_the_server(tmp_path):
    if cache_servers.program("nginx") is None:
        pytest.skip("`nginx` is not installed (Debian: nginx-light)")
    with cache_servers.nginx(tmp_path, "rewrite ^/team/cache(/.*)$ $1 last;") as server:
        publish(tmp_path / "a", f"{server.writer_url}/team/cache/")
        with opened(tmp_path / "b", f"{server.url}/team/cache") as cache:
            assert cache.lookup(RECORD.key) == Hit(RECORD, "remote")


# --- proxies


@pytest.fixture
def proxy(tmp_path):
    if cache_servers.program("tinyproxy") is None:
        pytest.skip("`tinyproxy` is not installed (Debian: tinyproxy-bin)")
    with cache_servers.tinyproxy(tmp_path, "BasicAuth bob geheim") as (address, log):
        yield address.replace("://", "://bob:geheim@"), log


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_through_a_proxy(nginx, proxy, tmp_path, monkeypatch, scheme):
    address, log = proxy
    url = nginx.url if scheme == "http" else nginx.tls_url
    options = {"remote_ca": str(nginx.certificate)} if scheme == "https" else {}
    monkeypatch.setenv(f"{scheme}_proxy", address)
    writer = url.replace("://", f"://{nginx.user}:{nginx.password}@")
    publish(tmp_path / "a", writer, **options)
    with opened(tmp_path / "b", url, **options) as cache:
        assert cache.lookup(RECORD.key) == Hit(RECORD, "remote")
    asked = log.read_text()
    assert (f"CONNECT localhost:{nginx.tls_url.rpartition(':')[2]}" in asked) == (scheme == "https")
    assert "Established connection" in asked
    before = len(asked)
    monkeypatch.setenv("no_proxy", "example.org, 127.0.0.1, localhost")
    with opened(tmp_path / "c", url, **options) as cache:
        assert cache.lookup(RECORD.key) == Hit(RECORD, "remote")
    assert len(log.read_text()) == before


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("trouble", ["wrong password", "not there"])
def test_a_proxy_of_no_use_is_a_fault(nginx, proxy, tmp_path, monkeypatch, scheme, trouble):
    address, _ = proxy
    url = nginx.url if scheme == "http" else nginx.tls_url
    if trouble == "not there":
        address = f"http://bob:geheim@127.0.0.1:{cache_servers.free_ports()[0]}"
    monkeypatch.setenv(f"{scheme}_proxy", address.replace("geheim", "geheimer"))
    kinds, warning = faulty(tmp_path / "c", url, remote_ca=str(nginx.certificate))
    assert kinds == {"permission" if trouble == "wrong password" else "refused"}
    assert "proxy" in warning
    assert "geheim" not in warning


def test_a_proxy_needs_no_scheme(nginx, proxy, tmp_path, monkeypatch):
    address, log = proxy
    monkeypatch.setenv("http_proxy", address.partition("://")[2])
    publish(tmp_path, nginx.writer_url)
    assert "Established connection" in log.read_text()


def test_a_proxy_whose_url_is_none_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://bob:geheim@[proxy")
    _, warning = faulty(tmp_path / "c", "http://cache.invalid")
    assert "the URL in `http_proxy` cannot be read" in warning
    assert "geheim" not in warning
