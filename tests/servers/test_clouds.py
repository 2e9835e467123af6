"""The cache in Google's and Azure's stores: what is theirs alone; the rest is in test_stores."""

from __future__ import annotations

import base64
import os
import socket
import threading
import time

import cache_servers
import pytest

from max_build.key import digest
from max_build.store import CacheSettings, Hit, Miss, open_cache
from max_build.store.objects import ObjectStore
from max_build.testing.store import example

ARTIFACT = b"kernel " * 50_000
CONTENT = {digest(ARTIFACT): ARTIFACT}
SECRET = base64.b64encode(b"geheim" * 8).decode()


@pytest.fixture(params=["google", "azure"])
def cloud(request):
    """The cloud's name, a URL, and the variables of its endpoint and its secret."""
    url = request.getfixturevalue(f"{request.param}_url")
    if request.param == "google":
        return url, "GOOGLE_BASE_URL", "GOOGLE_BEARER_TOKEN"
    return url, "AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_KEY"


def opened(folder, url, **options):
    return open_cache(CacheSettings(dir=str(folder), remote=url, **options))


def test_ci_publishes_and_everybody_hits(cloud, tmp_path):
    url, _, _ = cloud
    record = example("unit", ARTIFACT)
    with opened(tmp_path / "ci", url, remote_mode="read-write") as cache:
        assert cache.lookup(record.key) == Miss("absent")
        cache.publish(record, CONTENT)
        assert cache.warnings == []
    with opened(tmp_path / "bob", url) as cache:
        assert cache.lookup(record.key) == Hit(record, "remote")
        assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT
    (blob,) = ObjectStore(url).list("cas")
    assert blob.size < len(ARTIFACT) / 50


def test_of_many_writers_one_wins(cloud):
    url, _, _ = cloud
    won = []

    def write(number):
        if ObjectStore(url, writable=True).put_entry("a" * 64, b"%d" % number * 50_000):
            won.append(b"%d" % number * 50_000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ObjectStore(url).get_entry("a" * 64)] == won


def test_machines_wait_for_each_other(cloud, tmp_path):
    url, _, _ = cloud
    record = example("unit", ARTIFACT)
    compiled = []

    def build(number):
        with (
            opened(tmp_path / f"m{number}", url, remote_mode="read-write") as cache,
            cache.single_flight(record.key) as again,
        ):
            if again and isinstance(cache.lookup(record.key), Hit):
                return
            time.sleep(0.5)
            compiled.append(number)
            cache.publish(record, CONTENT)

    threads = [threading.Thread(target=build, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


def goes_on(cache):
    """Build with a remote that is of no use; what its faults were and what was said."""
    for name in "abcd":
        record = example(name, ARTIFACT)
        assert isinstance(cache.lookup(record.key), Miss)
        cache.publish(record, CONTENT)
        assert isinstance(cache.lookup(record.key), Hit)
    return {kind for tier, kind in cache.stats.faults if tier == "remote"}, "".join(cache.warnings)


def test_wrong_credentials_are_a_fault_and_no_secret_shows(cloud, tmp_path, monkeypatch):
    url, _, secret = cloud
    monkeypatch.setenv(secret, SECRET)
    with opened(tmp_path, url, remote_mode="read-write") as cache:
        kinds, said = goes_on(cache)
    assert "permission" in kinds
    assert SECRET not in said


def test_a_signature_in_the_url_does_not_show(azure_url, tmp_path, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    signature = "sv=2023-11-03&ss=b&srt=sco&sp=rwdlac&se=2099-01-01T00:00:00Z&sig=geheim%3D"
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signature)
    with opened(tmp_path, azure_url, remote_mode="read-write") as cache:
        kinds, said = goes_on(cache)
    assert "permission" in kinds
    assert "geheim" not in said


def test_a_bucket_that_is_not_there_is_told(cloud, tmp_path):
    url, _, _ = cloud
    with opened(tmp_path, url.replace(cache_servers.BUCKET, "nowhere")) as cache:
        assert cache.lookup(digest(b"k")).reason == "fault"
        assert "no such bucket" in cache.warnings[0]


def test_a_connection_that_breaks_is_tried_again(cloud, monkeypatch):
    """A relay in front of the server, which hangs up on the first two calls."""
    url, endpoint, _ = cloud
    store = ObjectStore(url, writable=True)
    store.put_entry("a" * 64, b"entry")
    whole = os.environ[endpoint]
    port = int(whole.split(":")[2].partition("/")[0])
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay():
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                calls.append(near)
                if len(calls) < 3:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", port))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=(one, other), daemon=True).start()

        threading.Thread(target=relay, daemon=True).start()
        monkeypatch.setenv(endpoint, whole.replace(str(port), str(listener.getsockname()[1])))
        assert ObjectStore(url).get_entry("a" * 64) == b"entry"
    assert len(calls) >= 3


def pump(source, target):
    while data := source.recv(65536):
        target.sendall(data)


def test_an_authority_that_cannot_be_read_is_named_and_a_build_goes_on(cloud, tmp_path):
    url, _, _ = cloud
    missing = str(tmp_path / "none.pem")
    with opened(tmp_path / "c", url, remote_mode="read-write", remote_ca=missing) as cache:
        kinds, said = goes_on(cache)
    assert kinds == {"io"}
    assert missing in said
