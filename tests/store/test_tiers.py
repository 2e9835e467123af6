"""Local → shared → remote, with directories for both outer tiers."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import defaultdict
from itertools import pairwise

import msgspec
import pytest

from max_build.errors import ConfigError
from max_build.key import digest
from max_build.record import encode
from max_build.store import CacheSettings, Hit, Miss, open_cache
from max_build.store.directory import DirectoryStore
from max_build.store.doctor import examine
from max_build.store.entry import seal
from max_build.store.lease import shared_lease
from max_build.store.tiers import Tier
from max_build.store.transfer import push
from max_build.store.trust import new_key
from max_build.testing.store import example

ARTIFACT = b"kernel " * 20_000


class Team:
    """Machines that share a directory and a remote."""

    def __init__(self, base):
        self.base = base
        for name in ("shared", "remote"):
            (base / name).mkdir()

    def open(self, machine, **changes):
        options = {
            "dir": str(self.base / machine),
            "shared": str(self.base / "shared"),
            "remote": f"file://{self.base / 'remote'}",
            "remote_mode": "read-write",
        }
        return open_cache(CacheSettings(**(options | changes)))

    def publish(self, machine, name="unit", data=ARTIFACT, **changes):
        record = example(name, data)
        with self.open(machine, **changes) as cache:
            cache.publish(record, {digest(data): data})
            assert cache.warnings == []
        return record

    def path(self, tier, kind, name):
        return self.base / tier / kind / name[:2] / name


@pytest.fixture
def team(tmp_path):
    return Team(tmp_path)


def test_a_colleague_hits_what_was_published(team):
    record = team.publish("alice")
    with team.open("bob") as cache:
        assert cache.lookup(record.key) == Hit(record, "shared")
        assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT
        assert cache.lookup(record.key) == Hit(record, "local")
        assert cache.records_of("unit") == [record]
        assert cache.stats.received == {"shared": len(ARTIFACT)}


def test_blobs_rest_compressed_outside_and_raw_inside(team):
    record = team.publish("alice")
    name = record.blobs[0].digest
    assert team.path("alice", "cas", name).read_bytes() == ARTIFACT
    for tier in ("shared", "remote"):
        assert team.path(tier, "cas", name).stat().st_size < len(ARTIFACT) / 50


def test_a_remote_hit_fills_the_tiers_before_it(team):
    record = team.publish("alice", shared="")
    with team.open("bob") as cache:
        assert cache.lookup(record.key) == Hit(record, "remote")
    with team.open("carol", remote="") as cache:
        assert cache.lookup(record.key) == Hit(record, "shared")


def test_a_read_only_tier_is_not_written(team):
    record = team.publish("alice", remote_mode="read", shared_mode="read")
    assert not list((team.base / "remote").glob("*/*/*"))
    assert not list((team.base / "shared").glob("*/*/*"))
    with team.open("bob") as cache:
        assert cache.lookup(record.key) == Miss("absent")


def test_without_fetch_nothing_is_written(team):
    record = team.publish("alice")
    with team.open("bob") as cache:
        assert cache.lookup(record.key, fetch=False) == Hit(record, "shared")
        assert not list((team.base / "bob").glob("*/*/*"))
        assert cache.stats.totals().hits == {}


def test_a_lost_local_blob_comes_back_from_outside(team):
    record = team.publish("alice")
    team.path("alice", "cas", record.blobs[0].digest).unlink()
    with team.open("alice") as cache:
        assert cache.lookup(record.key) == Hit(record, "shared")
    team.path("alice", "cas", record.blobs[0].digest).unlink()
    with team.open("alice") as cache:
        assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_a_blob_that_goes_bad_during_publish_is_no_reason_to_keep_the_rest_back(team, damage):
    team.publish("alice", data=ARTIFACT)
    common, own = digest(ARTIFACT), digest(b"own")
    path = team.path("alice", "cas", common)

    class Files(dict):
        """What is asked for `own`, after `common` was found to be there and right."""

        def get(self, name):
            if name == own:
                path.unlink()
                if damage == "flipped":
                    path.write_bytes(ARTIFACT[:-1] + b"?")
            return super().get(name)

    record = example("other", ARTIFACT, b"own")
    with team.open("alice") as cache:
        cache.publish(record, Files({own: b"own"}))
        assert cache.path(record.blobs[0]).read_bytes() == ARTIFACT
        assert dict(cache.stats.faults) == {("local", "corrupt"): 1} or damage == "gone"
    with team.open("bob") as cache:
        assert cache.lookup(record.key) == Hit(record, "shared")


@pytest.mark.parametrize("damage", ["cut", "other", "raw", "gone"])
def test_a_damaged_outer_blob_is_a_miss_that_heals(team, damage):
    record = team.publish("alice", remote="")
    path = team.path("shared", "cas", record.blobs[0].digest)
    if damage == "gone":
        path.unlink()
    else:
        other = example("other", b"other" * 1000)
        team.publish("alice", "other", b"other" * 1000, remote="")
        data = {
            "cut": path.read_bytes()[:-3],
            "other": team.path("shared", "cas", other.blobs[0].digest).read_bytes(),
            "raw": ARTIFACT,
        }[damage]
        path.write_bytes(data)
    with team.open("bob", remote="") as cache:
        found = cache.lookup(record.key)
        assert isinstance(found, Miss)
        assert found.reason == ("dangling" if damage == "gone" else "damaged")
        told = f"shared cache, blob {record.blobs[0].digest[:12]}: "
        assert [one.startswith(told) for one in cache.warnings] == [True] * (damage != "gone")
        cache.publish(record, {digest(ARTIFACT): ARTIFACT})
    with team.open("carol", remote="") as cache:
        assert cache.lookup(record.key) == Hit(record, "shared")


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_outer_entry_is_a_miss_that_heals(team, damage):
    record = team.publish("alice", remote="")
    other = team.publish("alice", "other", b"other", remote="")
    path = team.path("shared", "ac", record.key)
    path.write_bytes(
        {
            "cut": path.read_bytes()[:50],
            "empty": b"",
            "other": team.path("shared", "ac", other.key).read_bytes(),
        }[damage]
    )
    with team.open("bob", remote="") as cache:
        found = cache.lookup(record.key)
        assert isinstance(found, Miss)
        assert found.reason == "damaged"
        assert cache.stats.faults == {("shared", "corrupt"): 1}
        cache.publish(record, {digest(ARTIFACT): ARTIFACT})
    with team.open("carol", remote="") as cache:
        assert cache.lookup(record.key) == Hit(record, "shared")


def test_an_entry_whose_blob_was_collected_is_replaced_by_a_new_compile(team):
    # A compile is not reproducible: the second has other bytes, under the same key.
    record = team.publish("alice", remote="")
    team.path("shared", "cas", record.blobs[0].digest).unlink()
    again = example("unit", b"other bytes")
    with team.open("bob", remote="") as cache:
        cache.publish(again, {again.blobs[0].digest: b"other bytes"})
    with team.open("carol", remote="") as cache:
        assert cache.lookup(record.key) == Hit(again, "shared")


def test_the_first_of_two_compiles_stays(team):
    record = team.publish("alice", remote="")
    again = team.publish("bob", "unit", b"other bytes", remote="")
    with team.open("carol", remote="") as cache:
        assert cache.lookup(again.key) == Hit(record, "shared")
    with team.open("bob", remote="") as cache:
        assert cache.lookup(again.key) == Hit(again, "local")


def test_recipes_are_shared(team):
    lookup = digest(b"l")
    with team.open("alice") as cache:
        cache.add_recipe(lookup, b'{"by":"alice"}')
    with team.open("bob") as cache:
        assert cache.recipes(lookup) == (b'{"by":"alice"}',)
        cache.add_recipe(lookup, b'{"by":"bob"}')
        assert cache.recipes(lookup) == (b'{"by":"bob"}', b'{"by":"alice"}')
    with team.open("alice") as cache:
        assert cache.recipes(lookup) == (b'{"by":"alice"}',)
        assert set(cache.recipes(lookup, everywhere=True)) == {b'{"by":"alice"}', b'{"by":"bob"}'}


# --- a directory that is no good


def test_a_missing_shared_directory_is_a_warning(team):
    shutil.rmtree(team.base / "shared")
    with team.open("alice", remote="") as cache:
        assert "does not exist" in cache.warnings[0]
        assert cache.lookup(digest(b"k")) == Miss("absent")


def test_a_world_writable_shared_directory_needs_signatures(team):
    (team.base / "shared").chmod(0o777)
    with team.open("alice", remote="") as cache:
        assert "everybody may write" in cache.warnings[0]
        assert cache.outer == ()
    with team.open("alice", remote="", shared_trust="require") as cache:
        assert len(cache.outer) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_foreign_shared_directory_needs_signatures(team):
    os.chown(team.base / "shared", 12345, 12345)
    with team.open("alice", remote="") as cache:
        assert "belongs to user 12345" in cache.warnings[0]
        assert cache.outer == ()


def test_a_setting_below_the_home_of_nobody(team):
    from max_build.errors import ConfigError

    for name in ("dir", "shared"):
        with pytest.raises(ConfigError, match="nobody has the home directory of `~no-such-user/x`"):
            team.open("alice", remote="", **{name: "~no-such-user/x"})
    with team.open("alice", remote="", signing_key="~no-such-user/x") as cache:
        assert "records are not signed: nobody has the home" in cache.warnings[0]
    options = {"remote": "http://127.0.0.1:1", "remote_ca": "~no-such-user/x"}
    with team.open("alice", **options) as cache:
        cache.lookup(digest(b"k"))
        assert cache.warnings


def test_a_cache_that_is_closed_leaves_no_thread(team):
    before = set(threading.enumerate())
    with team.open("alice") as cache:
        cache.lookup(digest(b"k"))
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


def test_where_no_thread_can_be_started_a_build_goes_on(team):
    usual = threading.stack_size(1 << 46)  # more than there is address space for
    try:
        with team.open("alice", remote="") as cache:
            assert cache.warnings[0].endswith("no thread can be started to reach an outer cache")
    finally:
        threading.stack_size(usual)


def test_a_large_blob_is_synced_as_it_is_written(team, monkeypatch):
    """A disk that takes its time is seen to get on, and not given up at the last of a GB."""
    data = os.urandom(30 << 20)
    real, sizes = os.fsync, defaultdict(list)

    def fsync(fd):
        info = os.fstat(fd)
        sizes[info.st_ino].append(info.st_size)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    team.publish("alice", data=data, remote="")
    steps = [later - earlier for grown in sizes.values() for earlier, later in pairwise(grown)]
    assert len(steps) >= 3
    assert max(steps) < 12 << 20


# --- trust


@pytest.fixture
def keys(tmp_path):
    return {
        name: (new_key(name, tmp_path / f"{name}.key"), str(tmp_path / f"{name}.key"))
        for name in ("ci", "eve")
    }


def demanding(keys, **changes):
    return {"shared_trust": "require", "public_keys": (keys["ci"][0],), "remote": ""} | changes


def test_a_signed_record_is_a_hit(team, keys):
    record = team.publish("ci", remote="", signing_key=keys["ci"][1])
    with team.open("bob", **demanding(keys)) as cache:
        assert cache.lookup(record.key) == Hit(record, "shared")


@pytest.mark.parametrize("forgery", ["unsigned", "eve", "altered", "replayed"])
def test_any_other_record_is_a_miss_with_its_reason(team, keys, forgery):
    from max_build.store.entry import Sealed, seal, unseal

    record = example("unit", ARTIFACT)
    if forgery == "unsigned":
        team.publish("mallory", remote="")
    elif forgery == "eve":
        team.publish("mallory", remote="", signing_key=keys["eve"][1])
    else:
        name = "unit" if forgery == "altered" else "other"
        signed = team.publish("ci", name, remote="", signing_key=keys["ci"][1])
        path = team.path("shared", "ac", signed.key)
        found: Sealed = unseal(path.read_bytes())
        if forgery == "altered":
            payload = found.payload.replace(b'"seconds":2.0', b'"seconds":3.0')
            assert payload != found.payload
            path.write_bytes(seal(payload, found.signatures))
        else:
            target = team.path("shared", "ac", record.key)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
    with team.open("bob", **demanding(keys)) as cache:
        found = cache.lookup(record.key)
        assert isinstance(found, Miss)
        expected = {"unsigned": "unsigned", "eve": "unsigned", "altered": "altered"}
        assert found.reason == expected.get(forgery, "damaged")
    if forgery != "replayed":
        with team.open("carol", **demanding(keys, shared_trust="warn")) as cache:
            assert isinstance(cache.lookup(record.key), Hit)
            assert expected[forgery] in cache.warnings[0]
        with team.open("dave", **demanding(keys, shared_trust="off")) as cache:
            assert isinstance(cache.lookup(record.key), Hit)
            assert cache.warnings == []


def test_recipes_are_trusted_like_records(team, keys):
    lookup = digest(b"l")
    with team.open("mallory", remote="") as cache:
        cache.add_recipe(lookup, b'{"key":"bad"}')
    with team.open("bob", **demanding(keys)) as cache:
        assert cache.recipes(lookup) == ()
    with team.open("ci", **demanding(keys, signing_key=keys["ci"][1])) as cache:
        cache.add_recipe(lookup, b'{"key":"good"}')
    with team.open("bob", **demanding(keys)) as cache:
        assert cache.recipes(lookup) == (b'{"key":"good"}',)


@pytest.mark.parametrize("listed", [True, False])
def test_a_signer_vouches_for_no_recipe_that_nobody_signed(team, keys, listed):
    lookup, bad = digest(b"l"), b'{"key":"bad"}'
    public = (keys["ci"][0],) if listed else ()
    ci = {"remote": "", "signing_key": keys["ci"][1], "public_keys": public}
    with team.open("mallory", remote="") as cache:
        cache.add_recipe(lookup, bad)
    with team.open("ci", **ci) as cache:
        assert cache.recipes(lookup) == (bad,)  # with trust off it may be used, and is kept here
        assert b'"signatures":{}' in team.path("ci", "ac", lookup).read_bytes()
        cache.add_recipe(lookup, b'{"key":"good"}')
        cache.add_recipe(lookup, b'{"key":"better"}')
        good = (b'{"key":"better"}', b'{"key":"good"}')
        assert cache.recipes(lookup, everywhere=True) == good
    for machine in ("ci", "shared"):
        data = team.path(machine, "ac", lookup).read_bytes()
        assert b"bad" not in data
        assert b'"signatures":{"ci":' in data
    with team.open("bob", **demanding(keys)) as cache:
        assert cache.recipes(lookup) == good


def test_a_signer_replaces_what_it_does_not_trust(team, keys):
    team.publish("mallory", "unit", b"bad", remote="")
    good = example("unit", ARTIFACT)
    with team.open("ci", **demanding(keys, signing_key=keys["ci"][1])) as cache:
        assert isinstance(cache.lookup(good.key), Miss)
        cache.publish(good, {digest(ARTIFACT): ARTIFACT})
    with team.open("bob", **demanding(keys)) as cache:
        assert cache.lookup(good.key) == Hit(good, "shared")


def test_a_push_signs_nothing_that_came_unsigned(team, keys):
    """Else whoever may write to a directory without trust has a signing machine's signature."""
    evil, ours = example("evil", b"evil"), example("ours", b"ours")
    signing = {
        "signing_key": keys["ci"][1],
        "public_keys": (keys["ci"][0],),
        "remote_trust": "require",
    }
    with team.open("mallory", remote="") as cache:
        cache.publish(evil, {digest(b"evil"): b"evil"})
    with team.open("ci", **signing) as cache:
        assert cache.lookup(evil.key).tier == "shared"
        assert push(cache, [evil]).moved == (evil.key,)
        assert any("is pushed without our signature" in line for line in cache.warnings)
    with team.open("ci", remote="", signing_key=keys["ci"][1]) as cache:
        cache.publish(ours, {digest(b"ours"): b"ours"})
    with team.open("ci", **signing) as cache:
        assert push(cache, [ours]).moved == (ours.key,)
        assert cache.warnings == []
    reader = {"shared": "", "remote_trust": "require", "public_keys": (keys["ci"][0],)}
    with team.open("bob", **reader) as cache:
        assert cache.lookup(evil.key).reason == "unsigned"
        assert cache.lookup(ours.key) == Hit(ours, "remote")


@pytest.mark.parametrize("signer", ["", "eve", "ci"])
def test_what_will_be_a_miss_for_everybody_is_told_once(team, keys, signer):
    signing_key = keys[signer][1] if signer else ""
    with team.open("alice", **demanding(keys, signing_key=signing_key)) as cache:
        for name in (b"one", b"two"):
            cache.publish(example(name.decode(), name), {digest(name): name})
        told = [line for line in cache.warnings if "a miss for everybody" in line]
        assert len(told) == (signer != "ci")
        checks = [check for check in examine(cache) if check.place == "trust"]
    assert [check.verdict for check in checks] == ["ok" if signer == "ci" else "problem"]
    if signer == "eve":
        assert keys["eve"][0] in checks[0].fix


def test_a_private_key_is_private_and_never_replaced(tmp_path):
    from max_build.errors import ConfigError
    from max_build.store.trust import read_signer

    new_key("ci", tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="cannot be written"):
        new_key("ci", tmp_path / "key")
    secret = (tmp_path / "key").read_text()
    (tmp_path / "key").write_text(secret[:-8])
    with pytest.raises(ConfigError) as caught:
        read_signer(tmp_path / "key")
    assert secret[3:20] not in str(caught.value)


# --- leases


def test_machines_wait_for_each_other(team):
    record = example("unit", ARTIFACT)
    compiled = []

    def build(machine):
        with team.open(machine, remote="") as cache:
            if isinstance(cache.lookup(record.key), Hit):
                return
            with cache.single_flight(record.key) as waited:
                if waited and isinstance(cache.lookup(record.key), Hit):
                    return
                time.sleep(0.3)
                compiled.append(machine)
                cache.publish(record, {digest(ARTIFACT): ARTIFACT})

    threads = [threading.Thread(target=build, args=(f"m{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert not list((team.base / "shared" / "lease").iterdir())


def test_a_dead_holder_costs_the_lease_and_no_more(team):
    key = digest(b"k")
    with team.open("alice", remote="") as cache:
        (tier,) = cache.outer
        assert tier.store.take_lease(key, b"dead")
    # As if the other machine's clock were an hour ahead, or behind: nobody looks at it.
    for skew in (3600, -3600):  # seconds
        when = time.time() + skew
        os.utime(team.base / "shared" / "lease" / key, (when, when))
        with (
            team.open("bob", remote="", lease=0.6) as cache,
            cache.single_flight(key) as waited,
        ):
            assert waited
            tier.store.drop_lease(key, None)
        tier.store.take_lease(key, b"dead")


def test_a_living_holder_is_waited_for(team):
    key = digest(b"k")
    order = []

    def hold():
        with team.open("alice", remote="", lease=0.6) as cache, cache.single_flight(key):
            order.append("held")
            time.sleep(4)
            order.append("released")

    holder = threading.Thread(target=hold)
    holder.start()
    while not order:
        time.sleep(0.01)
    with team.open("bob", remote="", lease=2) as cache, cache.single_flight(key) as waited:
        order.append("next")
        assert waited
    holder.join()
    assert order == ["held", "released", "next"]


def test_a_lease_is_held_and_dropped_where_no_thread_can_be_started(tmp_path):
    store, key = DirectoryStore(tmp_path, shared=True), digest(b"k")
    usual = threading.stack_size(1 << 46)  # more than there is address space for
    try:
        with shared_lease(store, key, expiry=5, limit=1, guard=lambda act: act()) as waited:
            assert not waited
            assert not store.take_lease(key, b"another")
    finally:
        threading.stack_size(usual)
    assert store.take_lease(key, b"another")


def test_no_entry_is_lost_because_a_tier_failed_for_a_moment(team):
    record = team.publish("alice", remote="")
    with team.open("bob", remote="") as cache:
        (tier,) = cache.outer
        real = tier.store.get_blob

        def failing(digest, sink):
            from max_build.errors import StoreError

            message = "for a moment"
            raise StoreError(message, kind="server")

        tier.store.get_blob = failing
        found = cache.lookup(record.key)
        assert isinstance(found, Miss)
        assert found.reason == "fault"
        tier.store.get_blob = real
        assert cache.lookup(record.key) == Hit(record, "shared")


def test_an_entry_that_is_not_replaced_is_told(team):
    good, record = b"good", example("unit", b"good")
    with team.open("alice", remote="") as cache:
        (tier,) = cache.outer
        tier.store.put_entry(record.key, b"damaged")
        real = tier.store.put_entry
        tier.store.discard = lambda kind, name: None
        tier.store.put_entry = lambda key, data, replace=False: not replace and real(key, data)
        cache.publish(record, {digest(good): good})
        assert any("did not take the entry" in line for line in cache.warnings)
        assert cache.offer(record.key) == "the shared cache did not take it (server)"


@pytest.mark.parametrize("by", [1, -1])
def test_a_record_with_a_wrong_size_costs_no_good_blob(team, by):
    record = team.publish("alice", remote="")
    (blob,) = record.blobs
    bad = msgspec.structs.replace(
        example("bad", b"bad"), blobs=(msgspec.structs.replace(blob, size=blob.size + by),)
    )
    with team.open("mallory", remote="") as cache:
        cache.outer[0].store.put_entry(bad.key, seal(encode(bad)))
    with team.open("alice", remote="") as cache:
        assert cache.lookup(bad.key).reason == "damaged"
        assert cache.lookup(record.key) == Hit(record, "local")
        assert cache.warnings == []
    with team.open("bob", remote="") as cache:
        assert cache.lookup(bad.key).reason == "damaged"
        assert cache.lookup(record.key) == Hit(record, "shared")


def test_a_machine_that_only_fetches_makes_room(team):
    records = [team.publish("alice", f"u{n}", os.urandom(10_000), remote="") for n in range(4)]
    for record in records:
        with team.open("bob", remote="", max_size=25_000) as cache:
            assert cache.lookup(record.key) == Hit(record, "shared")
        past = time.time() - 7200
        for path in (team.base / "bob").glob("*/*/*"):
            os.utime(path, (past, past))
        (team.base / "bob" / "collected").unlink()
    assert sum(path.stat().st_size for path in (team.base / "bob" / "cas").glob("*/*")) <= 30_000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is two users")
def test_folders_take_the_group_of_a_root_that_does_not_hand_it_down(open_to_all):
    shared = open_to_all / "shared"
    shared.mkdir()
    os.chown(shared, 1001, 2000)
    shared.chmod(0o775)
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([2000])
            os.setgid(1001)
            os.setuid(1001)
            os.umask(0o077)
            DirectoryStore(shared, "shared", shared=True).put_entry(digest(b"k"), b"x")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    made = [path for path in shared.rglob("*") if path.is_dir()]
    assert len(made) == 3
    assert {(path.stat().st_gid, path.stat().st_mode & 0o7777) for path in made} == {(2000, 0o2775)}


@pytest.mark.parametrize(
    "url", ["file://relative", "file://tmp/team", "file://", "file:///srv/a?b", "file:///srv/a#b"]
)
def test_a_file_url_names_an_absolute_path(tmp_path, url):
    with pytest.raises(ConfigError, match="must have three slashes") as caught:
        open_cache(CacheSettings(dir=str(tmp_path / "c"), remote=url))
    if url == "file://tmp/team":
        assert "`file:///tmp/team`" in caught.value.message
    assert not (tmp_path / "c" / "relative").exists()


def test_a_file_url_may_name_this_host(team):
    record = team.publish("alice", remote=f"file://localhost{team.base / 'remote'}", shared="")
    with team.open("bob", shared="") as cache:
        assert cache.lookup(record.key) == Hit(record, "remote")


def test_a_teams_directory_in_place_of_ones_own_is_told(team):
    team.publish("alice", remote="")
    with open_cache(CacheSettings(dir=str(team.base / "shared"))) as cache:
        assert cache.warnings == []
        assert "holds compressed blobs" in "".join(check.text for check in examine(cache))
    (team.base / "shared").chmod(0o2775)
    with open_cache(CacheSettings(dir=str(team.base / "shared"))) as cache:
        assert "is made for a team" in cache.warnings[0]


# --- a tier that is sick


class Sick:
    """A real directory whose file system stops answering."""

    def __init__(self, store, delay):
        self._store, self._delay = store, delay

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get_entry(self, key):
        time.sleep(self._delay)
        return self._store.get_entry(key)


def test_a_bug_of_a_store_is_told_without_its_words(tmp_path):
    from max_build.errors import StoreError
    from max_build.store.directory import DirectoryStore

    class Broken(DirectoryStore):
        def get_entry(self, key):
            message = "Invalid header value b'Bearer geheim'"
            raise ValueError(message)

    faults = []
    tier = Tier(
        Broken(tmp_path),
        "off",
        request_timeout=20,
        budget=20,
        note=lambda label, error: faults.append(error.message),
    )
    with pytest.raises(StoreError):
        tier.entry(digest(b"k"))
    assert faults == ["local cache failed: ValueError"]
    tier.close()


def test_a_hung_tier_costs_its_budget_once(tmp_path):
    from max_build.errors import StoreError
    from max_build.store.directory import DirectoryStore

    faults = []
    tier = Tier(
        Sick(DirectoryStore(tmp_path), 30),
        "off",
        request_timeout=0.2,
        budget=0.5,
        note=lambda label, error: faults.append(error.kind),
    )
    for _ in range(50):
        with pytest.raises(StoreError):
            tier.entry(digest(b"k"))
    assert not tier.open
    assert faults.count("timeout") == 3
    tier.close()
