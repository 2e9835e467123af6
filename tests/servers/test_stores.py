"""The contract, against real servers."""

from __future__ import annotations

import uuid

import cache_servers
import pytest

from max_build.testing.store import Opener, StoreContract


class TestNginx(StoreContract):
    lists = False
    conditional = False

    @pytest.fixture
    def open_store(self, nginx) -> Opener:
        from max_build.store.http import HttpStore

        return lambda *, writable=True: HttpStore(
            nginx.writer_url if writable else nginx.url, writable=writable
        )


class _ObjectStore(StoreContract):
    @pytest.fixture
    def open_store(self, endpoint, s3_environment) -> Opener:
        from max_build.store.objects import ObjectStore

        s3_environment(endpoint)
        url = f"s3://{cache_servers.BUCKET}/{uuid.uuid4().hex}"
        return lambda *, writable=True: ObjectStore(url, writable=writable)


class TestSeaweed(_ObjectStore):
    @pytest.fixture
    def endpoint(self, seaweed) -> str:
        return seaweed


class TestMoto(_ObjectStore):
    @pytest.fixture
    def endpoint(self, moto) -> str:
        return moto


class TestRclone(_ObjectStore):
    """A server that ignores conditions: what depends on them is off, the rest must hold."""

    conditional = False

    @pytest.fixture
    def endpoint(self, rclone) -> str:
        return rclone


class _Cloud(StoreContract):
    @pytest.fixture
    def open_store(self, url) -> Opener:
        from max_build.store.objects import ObjectStore

        return lambda *, writable=True: ObjectStore(url, writable=writable)


class TestGoogle(_Cloud):
    @pytest.fixture
    def url(self, google_url) -> str:
        return google_url


class TestAzure(_Cloud):
    @pytest.fixture
    def url(self, azure_url) -> str:
        return azure_url
