"""Eight machines on one team's directory over real NFSv3, NFSv4.2 and SMB.

Server and clients are those of a real kernel, in User-Mode Linux: no module of this host is
needed, nothing of it is changed, and no other network is reached. What to install, on Debian:

    apt-get install --no-install-recommends e2fsprogs iproute2 kmod user-mode-linux \\
        rpcbind nfs-common nfs-kernel-server samba cifs-utils

and, as root (about five minutes each for the three):

    pytest -m slow -rA tests/faults/network

`guest.sh` is the guest's first process; `server.sh` starts and stops its file server, `mount.sh`
mounts the export as one of the machines does. `scenarios.py` then says what happened, as JSON
that is judged here; `-k nfs3` and the like choose. To see one by itself: `-k "smb and contend"`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = {
    "linux.uml": "user-mode-linux",
    "mkfs.ext4": "e2fsprogs",
    "ip": "iproute2",
    "modprobe": "kmod",
}
SERVERS = {
    "nfs": {"rpcbind": "rpcbind", "mount.nfs": "nfs-common", "rpc.nfsd": "nfs-kernel-server"},
    "smb": {"smbd": "samba", "mount.cifs": "cifs-utils"},
}
SCENARIOS = (
    "late beside contend users readonly mapped figures home killed collected recreated restarted"
    " unexported unplugged"
).split()
LIMIT = 600  # seconds; half of that is enough on an idle machine


class Guest:
    """What became of one boot."""

    def __init__(self, protocol: str, out: Path) -> None:
        self.protocol = protocol
        self._out = out

    def facts(self, scenario: str) -> dict:
        """What a scenario tells; fails where it did not get to its end."""
        told = self._out / f"{scenario}.json"
        if not told.exists() or not told.read_text():
            problems = self._out / f"{scenario}.err"
            log = (problems if problems.exists() else self._out / "log").read_text()
            pytest.fail(f"{self.protocol}: {scenario} has no end:\n{log[-4000:]}")
        facts = json.loads(told.read_text())
        print(f"{self.protocol} {scenario}: {json.dumps(facts)}")
        return facts


@pytest.fixture(scope="module", params=["nfs3", "nfs42", "smb"])
def guest(request, tmp_path_factory):
    """A guest that has gone through every scenario that was chosen."""
    protocol = request.param
    if os.geteuid() != 0:
        pytest.skip("a guest that may read this Python and mount needs root")
    for program, package in {**PROGRAMS, **SERVERS[protocol[:3]]}.items():
        if shutil.which(program, path=PATH) is None:
            pytest.skip(f"`{program}` is not here (Debian package `{package}`)")
    out = tmp_path_factory.mktemp(protocol)
    chosen = {
        item.function.scenario
        for item in request.session.items
        if getattr(item, "callspec", None) and item.callspec.params.get("guest") == protocol
    }
    # In memory where there is room: each write is one that the server is asked to keep.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, (out / "log").open("w") as log:
        disk = Path(folder, "disk")
        with disk.open("w") as file:
            file.truncate(512 << 20)
        variables = {
            "here": HERE,
            "python": sys.executable,
            "out": out,
            "protocol": protocol,
            "scenarios": ",".join(name for name in SCENARIOS if name in chosen),
        }
        command = ["linux.uml", "mem=1500M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/"]
        command += ["ro", f"ubd0={disk}", f"init={HERE / 'guest.sh'}", "con=null", "con0=fd:0,fd:1"]
        command += ["quiet", f"uml_dir={folder}/", f"umid={protocol}"]
        command += [f"{name}={value}" for name, value in variables.items()]
        guest = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            guest.wait(LIMIT)  # its exit status says nothing
        except subprocess.TimeoutExpired:
            log.write(f"\nstopped after {LIMIT} s\n")
        finally:
            # Each of the guest's processes is one of the host's, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guest.pid, signal.SIGKILL)
            guest.wait()
    print((out / "log").read_text()[-2000:])
    return Guest(protocol, out)


def scenario(name):
    """Mark a test as the judge of a scenario."""

    def marked(function):
        function.scenario = name
        return function

    return marked


@scenario("late")
def test_what_another_published_is_seen_at_the_next_look(guest):
    assert guest.facts("late") == {"seen": 20}


@scenario("beside")
def test_a_folder_that_another_made_meanwhile_takes_our_entry(guest):
    assert guest.facts("beside") == {"hit shared": 20, "right": 20}


@scenario("contend")
def test_eight_machines_compile_each_key_once(guest):
    facts = guest.facts("contend")
    assert facts["errors"] == facts["findings"] == facts["compiled more than once"] == []
    assert facts["compiled"] == 25 + 8 * 25
    assert facts["leftovers"] == 0


@scenario("users")
def test_two_users_under_umask_077_share_a_directory(guest):
    facts = guest.facts("users")
    assert facts["errors"] == facts["findings"] == []
    assert (facts["ann"], facts["bob"]) == (10, 0)
    assert facts["folders"] == ["0o42775"]
    assert facts["modes"] == ["0o100664"]


@scenario("readonly")
def test_what_is_read_only_is_read(guest):
    facts = guest.facts("readonly")
    assert facts.pop("first") == {"miss absent": 6, "right": 6}
    assert set(facts) == ({"mount"} if guest.protocol == "smb" else {"mount", "export"})
    for came in facts.values():
        assert came == {"hit shared": 6, "miss absent": 1, "right": 7}


@scenario("mapped")
def test_a_mapped_artifact_outlives_its_collection_by_another_machine(guest):
    facts = guest.facts("mapped")
    assert facts["shared"] == {"right": True, "gone": False}
    if guest.protocol != "smb":
        assert facts["home"] == {"right": True, "gone": True}


@scenario("figures")
def test_figures(guest):
    assert guest.facts("figures")["notes"] == []


# Not on SMB, where the index's locks cost seconds: a home there is no place for a cache.
@pytest.mark.parametrize("guest", ["nfs3", "nfs42"], indirect=True)
@scenario("home")
def test_a_home_directory_is_one_cache_for_all_machines(guest):
    # Whether each key is compiled once is up to the client's caches: a home is not a team's.
    facts = guest.facts("home")
    assert facts["errors"] == facts["findings"] == []
    assert facts["compiled"] == facts["wanted"]


@scenario("killed")
def test_machines_killed_at_random_harm_nobody(guest):
    facts = guest.facts("killed")
    assert facts["errors"] == facts["findings"] == []
    assert facts["rounds"] == 6


@scenario("collected")
def test_one_machine_may_collect_what_seven_use(guest):
    facts = guest.facts("collected")
    right(facts)
    assert facts["collector"]["removed"] > 0
    # With no grace at all, a blob may go between its writing and that of the record.
    assert all("which is gone" in finding for finding in facts["findings"])


@scenario("recreated")
def test_the_directory_may_be_made_anew(guest):
    healed(guest.facts("recreated"))


@scenario("restarted")
def test_the_server_may_be_restarted(guest):
    healed(guest.facts("restarted"))


# A share that Samba closes by force does not come back to this client: nothing to learn there.
@pytest.mark.parametrize("guest", ["nfs3", "nfs42"], indirect=True)
@scenario("unexported")
def test_handles_may_go_stale(guest):
    facts = guest.facts("unexported")
    assert any(what.startswith("fault") or what == "left out" for what in facts["came"])
    healed(facts)


@scenario("unplugged")
def test_the_network_may_fail(guest):
    facts = guest.facts("unplugged")
    assert facts["came"]["left out"] > 0
    healed(facts)


def right(facts):
    """No exception, and every artifact the right one."""
    assert facts["errors"] == []
    came = facts["came"]
    looked = sum(count for what, count in came.items() if what.startswith(("hit", "miss")))
    assert came["right"] == looked > 0


def healed(facts):
    """The same, no build that hung, and all well afterwards."""
    right(facts)
    # Of seconds; a hard mount waits for ever, a build for its budget. The guest is slow.
    assert facts["longest"] < 60
    assert facts["findings"] == facts["after"] == []
