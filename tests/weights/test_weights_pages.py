"""Bytes into memory: mapped or read, shared, fork-safe, and never a signal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from weights_files import safetensors, tensors

from max_build.errors import WeightsError
from max_build.machine import mount
from max_build.weights import Weights, open_weights, pages, policy
from max_build.weights.fingerprint import fingerprint
from max_build.weights.pages import CHUNK, File, in_parallel

SIZE = (CHUNK + 100_000) // 4  # floats: more than a window, not a whole number of pages
DATA = np.random.default_rng(0).bytes(SIZE * 4 + 7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    header, _ = tensors(a=("F32", [SIZE]), b=("U8", [3]), c=("F32", [1]), z=("F32", [0]))
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors(header, DATA, pad=b" " * (-len(json.dumps(header)) % 64 + 56)))
    assert open_weights(path)["a"].alignment >= 64
    return path


def child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_mapped_and_read_are_the_same(path: Path) -> None:
    mapped, read = open_weights(path, mode="map"), open_weights(path, mode="read")
    for name, tensor in mapped.items():
        assert tensor.numpy().tobytes() == read[name].numpy().tobytes() == tensor.tobytes()
    assert read["a"].file.is_read
    assert not mapped["a"].file.is_read


def test_an_arena_holds_only_what_was_asked_for(path: Path) -> None:
    weights = open_weights(path, mode="read")
    weights["b"].numpy()
    filled = weights["b"].file._filled
    assert filled is not None
    assert 0 < sum(filled) < len(filled)
    assert weights.prefetch().nbytes >= SIZE * 4
    assert 0 not in filled


def test_arenas_are_filled_once_by_many_threads(path: Path) -> None:
    weights = open_weights(path, mode="read")
    arrays: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: arrays.append(weights["a"].numpy())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({array.ctypes.data for array in arrays}) == 1
    assert all(array.tobytes() == weights["a"].tobytes() for array in arrays)


@pytest.mark.parametrize("mode", ["map", "read"])
def test_prefetch_tells_how_far_it_is(mode: policy.Mode, path: Path) -> None:
    weights = open_weights(path, mode=mode)
    steps: list[tuple[int, int]] = []
    done = weights.prefetch(progress=lambda *step: steps.append(step))
    assert steps[-1] == (done.nbytes, done.nbytes)
    assert done.nbytes == SIZE * 4 + 7
    assert done.gigabytes_per_second > 0
    assert weights.prefetch(["b"]).nbytes == 3


def test_prefetch_makes_the_file_resident(path: Path) -> None:
    file = File(str(path))
    os.sync()
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if file.resident() > 0.5:
        pytest.skip("this filesystem's pages cannot be dropped")
    open_weights(path).prefetch()
    assert file.resident() > 0.99


def test_views_do_not_reach_the_file(path: Path) -> None:
    before = path.read_bytes()
    weights = open_weights(path)
    with pytest.raises(ValueError, match="read-only"):
        weights["a"].numpy()[0] = 1
    weights["a"].writable()[:] = 1
    assert path.read_bytes() == before


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


@pytest.mark.parametrize("mode", ["map", "read"])
@pytest.mark.parametrize("use", ["numpy", "dlpack", "tobytes", "prefetch", "fingerprint"])
@pytest.mark.parametrize("touched", [False, True])
def test_a_file_that_shrinks_is_an_error(
    mode: policy.Mode, use: str, touched: bool, path: Path
) -> None:
    weights = open_weights(path, mode=mode)
    if touched:
        weights["a"].numpy()
    truncate(path)
    actions = {
        "numpy": weights["a"].numpy,
        "dlpack": weights["a"].__dlpack__,
        "tobytes": weights["a"].tobytes,
        "prefetch": weights.prefetch,
        "fingerprint": lambda: fingerprint(weights),
    }
    with pytest.raises(WeightsError, match=r"x\.safetensors` (was changed while|at offset)"):
        actions[use]()


def test_a_file_that_shrinks_between_check_and_use_is_an_error(path: Path) -> None:
    """What the check cannot see, the kernel says: EFAULT, or a short read."""
    weights = open_weights(path, mode="map")
    file = weights["a"].file
    memory = file.memory(0, 0)
    os.truncate(path, 4096)
    file.check = lambda: None  # type: ignore[method-assign]
    with pytest.raises(WeightsError, match="at offset 8192"):
        file._populate(memory, 8192, 4096)
    with pytest.raises(WeightsError, match="the file ends there"):
        file.read(8192, 4)


def test_a_file_rewritten_in_place_is_an_error(path: Path) -> None:
    weights = open_weights(path)
    weights["a"].numpy()
    status = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-4, 2)
        stream.write(b"\1\1\1\1")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(WeightsError, match="was changed"):
        weights["a"].numpy()


def test_a_file_replaced_by_another_stays_what_it_was(path: Path) -> None:
    weights = open_weights(path)
    before = weights["a"].tobytes()
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)
    assert weights["a"].numpy().tobytes() == before
    assert fingerprint(weights).tensors == fingerprint(weights).tensors
    path.unlink()
    assert weights["a"].tobytes() == before


def test_touching_is_never_a_signal(path: Path) -> None:
    done = child(
        """
        import os, sys
        from max_build.errors import WeightsError
        from max_build.weights import open_weights
        for mode in ("map", "read"):
            weights = open_weights(sys.argv[1], mode=mode)
            weights["c"].numpy()
            os.truncate(sys.argv[1], os.path.getsize(sys.argv[1]) - 1)
            for action in (weights["a"].numpy, weights.prefetch):
                try:
                    action()
                except WeightsError as error:
                    print("refused")
            os.truncate(sys.argv[1], os.path.getsize(sys.argv[1]) + 1)
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, "refused\n" * 4), done.stderr


def test_an_address_space_limit_falls_back_to_an_error_or_a_read(path: Path) -> None:
    done = child(
        """
        import resource, sys, mmap
        import numpy
        from max_build.errors import WeightsError
        from max_build.weights import open_weights
        weights = open_weights(sys.argv[1])
        used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20),) * 2)
        try:
            weights["a"].numpy()
        except WeightsError as error:
            print(error)
        """,
        path,
    )
    assert done.returncode == 0, done.stderr
    assert "Cannot allocate memory" in done.stdout


def test_reading_more_than_there_is_memory_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "available_memory", lambda: 1 << 20)
    weights = open_weights(path, mode="read")
    with pytest.raises(WeightsError, match=r"takes 4 MiB; 1 MiB are free"):
        weights["a"].numpy()
    assert open_weights(path)["a"].numpy().size == SIZE


def test_close_is_refused_while_views_live(path: Path) -> None:
    for view in (lambda t: t.numpy(), np.asarray, np.from_dlpack):
        weights = open_weights(path)
        array = view(weights["a"])
        with pytest.raises(WeightsError, match="still use its memory"):
            weights.close()
        del array
        weights.close()
        with pytest.raises(WeightsError, match="is closed"):
            weights["a"].numpy()


def test_views_outlive_their_weights(path: Path) -> None:
    before = open_weights(path)["a"].tobytes()
    for view in (lambda t: t.numpy(), np.asarray, np.from_dlpack):
        assert view(open_weights(path)["a"]).tobytes() == before


def test_a_forked_child_reads_on(path: Path) -> None:
    done = child(
        """
        import os, sys, threading
        from max_build.weights import open_weights
        for mode in ("map", "read"):
            weights = open_weights(sys.argv[1], mode=mode)
            expected = weights["a"].tobytes()
            file = weights["a"].file
            with file._lock:  # as if another thread were at work
                pid = os.fork()
                if pid == 0:
                    os._exit(0 if weights["a"].numpy().tobytes() == expected else 1)
            print(os.waitpid(pid, 0)[1])
            assert weights["a"].numpy().tobytes() == expected
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, "0\n0\n"), done.stderr


def test_two_processes_share_pages(path: Path) -> None:
    """Reading every page makes none private."""
    weights = open_weights(path, mode="map")
    array = weights["a"].numpy()
    assert array.view(np.uint8).sum() > 0
    address, private, inside = array.ctypes.data, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            begin, end = (int(x, 16) for x in line.split(" ")[0].split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("Anonymous:"):
            private += int(line.split()[1])
    assert private == 0


def test_opening_does_not_read_the_data(tmp_path: Path) -> None:
    """A sparse terabyte opens at once, and takes no memory."""
    count = 1 << 38
    header = {"a": {"dtype": "F32", "shape": [count], "data_offsets": [0, count * 4]}}
    content = safetensors(header)
    path = tmp_path / "huge.safetensors"
    path.write_bytes(content)
    try:
        os.truncate(path, len(content) + count * 4)
    except OSError:
        pytest.skip("the filesystem has no files of a terabyte")
    weights = open_weights(path)
    assert weights.nbytes == count * 4
    assert not weights["a"].numpy()[[0, count // 2, -1]].any()


def test_importing_loads_no_numpy() -> None:
    heavy = ("numpy", "ctypes", "max", "cuda", "gguf", "torch", "difflib")
    done = child(
        f"""
        import sys, max_build.weights, max_build.weights.binding, max_build.weights.device
        print([name for name in {heavy!r} if name in sys.modules])
        """
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_open_files_are_not_pickled(path: Path) -> None:
    import pickle

    with pytest.raises(TypeError, match="open it again by its path"):
        pickle.dumps(open_weights(path))


def test_failures_in_threads_are_raised() -> None:
    def work(piece: int) -> None:
        if piece == 3:
            message = "three"
            raise ValueError(message)

    with pytest.raises(ValueError, match="three"):
        in_parallel(work, list(range(6)))


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 27 0:50 / /mnt/team rw - nfs4 server:/team rw,vers=4.2
41 27 0:51 / /mnt/my\\040bucket rw,nosuid - fuse.gcsfuse bucket rw
42 27 0:52 /sub /data rw,relatime shared:7 master:1 - btrfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "device", "kind", "how"),
    [
        ("/home/x", os.makedev(254, 0), "ext4", "map"),
        ("/mnt/team/x", os.makedev(0, 50), "nfs4", "read"),
        ("/mnt/my bucket/x", os.makedev(0, 99), "fuse.gcsfuse", "read"),
        ("/data/x", os.makedev(0, 98), "btrfs", "map"),
        ("/mnt/teamwork/x", os.makedev(0, 97), "ext4", "map"),
    ],
)
def test_the_filesystem_decides(path: str, device: int, kind: str, how: str) -> None:
    assert mount(MOUNTS, device, path).kind == kind
    assert policy.access_for("auto", kind).how == how
    assert policy.access_for("map", kind).how == "map"
    assert policy.access_for("read", kind).how == "read"


def test_the_real_filesystem_has_a_name(path: Path) -> None:
    assert File(str(path)).filesystem


@pytest.mark.parametrize(
    ("kind", "resident", "tight", "direct"),
    [
        ("ext4", 0.0, False, True),
        ("ext4", 0.6, False, False),
        ("ext4", 0.6, True, True),
        ("ext4", 1.0, True, False),
        ("nfs4", 0.0, False, False),
        ("tmpfs", 0.0, True, False),
    ],
)
def test_direct_reads_are_for_cold_local_files(
    kind: str, resident: float, tight: bool, direct: bool
) -> None:
    assert policy.reads_directly(kind, resident, tight=tight) is direct


def test_weights_are_a_mapping(path: Path) -> None:
    with open_weights(path) as weights:
        assert isinstance(weights, Weights)
        assert dict(weights).keys() == {"a", "b", "c", "z"}
        assert weights.nbytes == SIZE * 4 + 7
        assert "4 tensors" in repr(weights)
        assert repr(weights["a"]) == f"<Tensor 'a' float32 [{SIZE}]>"
        assert weights["c"].alignment in (1, 2)


@pytest.mark.parametrize("direct", [False, True])
def test_arenas_are_filled_either_way(
    direct: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "reads_directly", lambda *_, **__: direct)
    weights = open_weights(path, mode="read")
    for tensor in weights.values():
        assert tensor.numpy().tobytes() == tensor.tobytes()
