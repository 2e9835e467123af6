"""Weights against every peer that is installed: open, read, hand over, and what it takes.

    python tests/benchmarks/bench_weights.py [--dir DIR] [--repeat 5] [--size 1.0] [--json FILE]
                                             [--gguf FILE] [--only WORD] [--device] [--best]

Each measurement is made in a fresh process (imports excluded) and told as the median. Absolute
figures depend on the machine: the ratios to plain reads and to peers of the same run count.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20
BEST = {"gb_s": max}
Result = dict[str, Any]


# Files


def write_safetensors(path: Path, specs: list[tuple[str, str, list[int], int]]) -> None:
    """`specs` are (name, dtype, shape, bytes); the data is noise that no page repeats."""
    header, end = {}, 0
    for name, dtype, shape, nbytes in specs:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    noise = os.urandom(64 * MIB)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, end, len(noise)):
            shift = begin // len(noise) * 4097 % len(noise)
            piece = noise[shift:] + noise[:shift]
            stream.write(piece[: min(len(noise), end - begin)])


def model(gigabytes: float) -> list[tuple[str, str, list[int], int]]:
    """338 tensors as of a 28-layer decoder, scaled to a size."""
    width = max(64, int((gigabytes * 1e9 / (28 * 12 * 2)) ** 0.5))
    specs = []
    for layer in range(28):
        for part in range(12):
            name = f"model.layers.{layer}.part_{part}.weight"
            specs.append((name, "BF16", [width, width], 2 * width * width))
    specs += [(f"model.norm.{i}", "F32", [width], 4 * width) for i in range(2)]
    return specs


def make_files(folder: Path, gigabytes: float) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "model": folder / f"model-{gigabytes}.safetensors",
        "many": folder / "many.safetensors",
        "many_gguf": folder / "many.gguf",
        "vocab": folder / "vocab.gguf",
    }
    if not files["model"].exists():
        write_safetensors(files["model"], model(gigabytes))
    names = [f"layers.{i // 1000}.experts.{i % 1000}.w{i % 3}.weight" for i in range(100_000)]
    if not files["many"].exists():
        write_safetensors(files["many"], [(name, "F32", [8, 8], 256) for name in names])
    if not files["many_gguf"].exists() or not files["vocab"].exists():
        import gguf
        import numpy as np

        array = np.ones((8, 8), np.float32)
        for path, tensors, words in (
            (files["many_gguf"], names, 0),
            (files["vocab"], names[:338], 151_936),
        ):
            writer = gguf.GGUFWriter(path, "llama")
            if words:
                writer.add_token_list([f"tok{i}" for i in range(words)])
                writer.add_token_types([1] * words)
                writer.add_token_merges([f"a{i} b{i}" for i in range(words)])
            for name in tensors:
                writer.add_tensor(name, array)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
    return files


# Measuring, in the child


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    kept = action()
    return time.perf_counter() - begun, kept


def memory() -> dict[str, int]:
    """Current and peak resident bytes of this process."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon", "RssFile", "VmHWM")):
            found[line.split(":")[0]] = int(line.split()[1]) * 1024
    return found


def warm(path: str) -> None:
    buffer = mmap.mmap(-1, 4 * MIB)
    descriptor = os.open(path, os.O_RDONLY)
    offset = 0
    while got := os.preadv(descriptor, [buffer], offset):
        offset += got
    os.close(descriptor)


def cool(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def loop(path: str, threads: int, block: int, flags: int = 0) -> None:
    """The limit: a plain preadv loop into one reused huge-page buffer for each thread."""
    size = os.path.getsize(path)
    offsets: Iterator[int] = iter(range(0, size, block))
    lock = threading.Lock()

    def work() -> None:
        buffer = mmap.mmap(-1, block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(buffer)
        descriptor = os.open(path, os.O_RDONLY | flags)
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                break
            done = 0
            while done < min(block, size - offset):
                got = os.preadv(descriptor, [view[done:]], offset + done)
                if not got:
                    break
                done += got
        os.close(descriptor)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def consumer(plan: Any) -> Any:
    """A sink that takes blocks and copies them nowhere: bytes have reached the consumer."""
    from max_build.weights.stream import staging

    class Consumer:
        def __init__(self) -> None:
            slots = [(lane, slot) for lane in range(plan.lanes) for slot in range(plan.slots)]
            self.slots = {key: memoryview(staging(plan.slot_bytes)) for key in slots}

        def buffer(self, lane: int, slot: int) -> memoryview:
            return self.slots[lane, slot]

        def take(self, block: Any) -> None:
            pass

        def finish(self, lane: int) -> None:
            pass

    return Consumer()


def measure_open(method: str, path: str) -> Result:
    if method == "max-build":
        from max_build.weights import open_weights

        action: Callable[[], Any] = lambda: open_weights(path)
    elif method == "max-build, memo":
        from max_build.weights import open_weights

        memo = path + ".memo"
        open_weights(path, memo=memo)
        action = lambda: open_weights(path, memo=memo)
    elif method == "max-build, memo, all looked up":
        from max_build.weights import open_weights

        memo = path + ".memo"
        open_weights(path, memo=memo)
        action = lambda: dict(open_weights(path, memo=memo))
    elif method == "max-build, all looked up":
        from max_build.weights import open_weights

        action = lambda: dict(open_weights(path))
    elif method == "max-build, memo by header":
        from max_build.weights import open_weights, remembered

        memo = path + ".memo"
        open_weights(path, memo=memo)
        remembered._stamp = lambda _: ""  # type: ignore[assignment]
        action = lambda: open_weights(path, memo=memo)
    elif method == "safetensors":
        import numpy as np  # noqa: F401
        from safetensors import safe_open

        def action() -> Any:
            opened = safe_open(path, "numpy")
            names = opened.keys()
            return [
                (opened.get_slice(n).get_dtype(), opened.get_slice(n).get_shape()) for n in names
            ]
    elif method == "gguf":
        import gguf

        action = lambda: gguf.GGUFReader(path)
    elif method == "MAX":
        if path.endswith(".gguf"):
            from max.graph.weights import GGUFWeights as Loader

            action = lambda: list(Loader(path).items())
        else:
            from max.graph.weights import SafetensorWeights as Loader

            action = lambda: list(Loader([Path(path)]).items())
    elif method == "json, no checks":

        def action() -> Any:
            with open(path, "rb") as stream:
                return json.loads(stream.read(int.from_bytes(stream.read(8), "little")))

    before = memory()
    seconds, _kept = timed(action)
    return {"ms": seconds * 1e3, "anon_mb": (memory()["RssAnon"] - before["RssAnon"]) / 1e6}


def measure_read(method: str, path: str, threads: int) -> Result:
    size = os.path.getsize(path)
    if method == "plain preadv, 2 MiB":
        action: Callable[[], Any] = lambda: loop(path, threads, 2 * MIB)
    elif method == "plain O_DIRECT, 4 MiB":
        action = lambda: loop(path, threads, 4 * MIB, os.O_DIRECT)
    elif method.startswith("max-build"):
        import ctypes  # noqa: F401 - imported by a first look at the page cache

        from max_build.weights import open_weights
        from max_build.weights.plan import make_plan
        from max_build.weights.stream import execute

        block = 2 if "2 MiB" in method else 4

        def action() -> Any:
            plan = make_plan(open_weights(path), lanes=threads, slots=1, slot_bytes=block * MIB)
            return execute(plan, consumer(plan))
    elif method == "safetensors load_file":
        import ml_dtypes  # noqa: F401
        from safetensors.numpy import load_file

        action = lambda: load_file(path)
    elif method == "torch load_file + clone":
        import torch
        from safetensors.torch import load_file as load

        torch.set_num_threads(threads)
        action = lambda: {name: tensor.clone() for name, tensor in load(path).items()}
    elif method == "readinto fresh memory":

        def action() -> Any:
            buffer = bytearray(size)
            with open(path, "rb", buffering=0) as stream:
                view = memoryview(buffer)
                while view and (got := stream.readinto(view)):
                    view = view[got:]
            return buffer
    elif method == "MAX data() + copy":
        from max.dtype import DType
        from max.graph.weights import SafetensorWeights

        def action() -> Any:
            kept = []
            for pair in SafetensorWeights([Path(path)]).items():
                buffer = pair[1].data().data
                count = buffer.num_elements * buffer.dtype.size_in_bytes
                kept.append(buffer.view(DType.uint8, (count,)).to_numpy().copy())
            return kept
    elif method == "fastsafetensors":
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        def action() -> Any:
            loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
            loader.add_filenames({0: [path]})
            return loader.copy_files_to_device()
    elif method == "Run:ai streamer":
        os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(threads)
        from runai_model_streamer import SafetensorsStreamer

        def action() -> Any:
            with SafetensorsStreamer() as streamer:
                streamer.stream_file(path)
                return sum(tensor.nbytes for _, tensor in streamer.get_tensors())
    elif method == "InstantTensor":
        import instanttensor

        def action() -> Any:
            with instanttensor.safe_open([path], framework="pt", device="cpu") as opened:
                return sum(tensor.nbytes for _, tensor in opened.tensors())
    elif method == "map, page by page":

        def action() -> Any:
            descriptor = os.open(path, os.O_RDONLY)
            memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
            memory.madvise(mmap.MADV_RANDOM)  # stands for a filesystem that does not read ahead
            return sum(memory[offset] for offset in range(0, size, mmap.PAGESIZE))

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory()
    usage = time.process_time()
    seconds, kept = timed(action)
    after = memory()
    resident = before["RssAnon"] + before["RssFile"]
    result = {
        "gb_s": size / seconds / 1e9,
        "cpu_s_per_gb": (time.process_time() - usage) / size * 1e9,
        "peak_mb": (after["VmHWM"] - resident) / 1e6,
    }
    del kept
    return result


def measure_tiny(method: str, path: str) -> Result:
    """All bytes of 100,000 small tensors, after open."""
    if method.startswith("max-build"):
        from max_build.weights import open_weights

        weights = open_weights(path, mode="read" if "read" in method else "map")
        action: Callable[[], Any] = weights.prefetch
    else:
        from safetensors.numpy import load_file

        action = lambda: load_file(path)
    seconds, _ = timed(action)
    return {"ms": seconds * 1e3}


def measure_views(method: str, path: str) -> Result:
    from max.driver import Buffer

    if method == "max-build":
        from max_build.weights import open_weights
        from max_build.weights.device import host_buffers

        weights = open_weights(path)
        host_buffers({name: weights[name] for name in list(weights)[:3]})
        before = memory()
        seconds, buffers = timed(lambda: host_buffers(weights))
        name = next(iter(weights))
        assert buffers[name]._data_ptr() == weights[name].writable().ctypes.data
    else:
        from max.graph.weights import SafetensorWeights

        found = dict(SafetensorWeights([Path(path)]).items())
        before = memory()
        seconds, buffers = timed(
            lambda: {n: Buffer.from_dlpack(w.data()) for n, w in found.items()}
        )
    anon = memory()["RssAnon"] - before["RssAnon"]
    return {"us_each": seconds / len(buffers) * 1e6, "anon_mb": anon / 1e6}


def measure_device(method: str, path: str) -> Result:
    """Deliver to the first GPU, and compare what arrived with the file."""
    from max_build.weights import open_weights
    from max_build.weights.device import cuda_buffers, device_buffers

    weights = open_weights(path)
    if method == "max-build to MAX":
        from max.driver import CPU, Accelerator
        from max.dtype import DType

        device = Accelerator(0)
        device_buffers({}, device)
        seconds, buffers = timed(lambda: device_buffers(weights, device))
        for name, buffer in buffers.items():
            raw = buffer.to(CPU()).view(DType.uint8, (weights[name].nbytes,)).to_numpy()
            assert raw.tobytes() == weights[name].tobytes(), name
    elif method == "max-build to cuda.core":
        import ctypes

        from cuda.core import Device, LegacyPinnedMemoryResource

        seconds, buffers = timed(lambda: cuda_buffers(weights))
        stream = Device(0).create_stream()
        for name, buffer in buffers.items():
            host = LegacyPinnedMemoryResource().allocate(buffer.size)
            host.copy_from(buffer, stream=stream)
            stream.sync()
            raw = ctypes.string_at(int(host.handle), buffer.size)
            assert raw == weights[name].tobytes(), name
    else:
        from safetensors.torch import load_file

        seconds, _ = timed(lambda: load_file(path, device="cuda:0"))
    return {"gb_s": weights.nbytes / seconds / 1e9}


def measure_hash(method: str, path: str) -> Result:
    from max_build.weights import open_weights
    from max_build.weights.fingerprint import fingerprint

    weights = open_weights(path)
    seconds, _ = timed(lambda: fingerprint(weights))
    return {"gb_s": weights.nbytes / seconds / 1e9}


def measure_decode(method: str, path: str) -> Result:
    """All quantised tensors of a GGUF to new `float32` arrays."""
    import gguf

    from max_build.weights import open_weights
    from max_build.weights.convert import Converted
    from max_build.weights.device import host_buffers

    weights = {n: t for n, t in open_weights(path).items() if t.type.block > 1}
    kinds = {name: gguf.GGMLQuantizationType[t.dtype.upper()] for name, t in weights.items()}
    warm(path)
    if method == "gguf.quants":
        action: Callable[[], Any] = lambda: [
            gguf.quants.dequantize(t.writable(), kinds[n]) for n, t in weights.items()
        ]
    elif method == "max-build":
        action = lambda: [t.dequantize() for t in weights.values()]
    elif method == "max-build, into MAX":
        cast = {n: Converted(t, dtype="float32", transpose=False) for n, t in weights.items()}
        host_buffers({})
        action = lambda: host_buffers(cast)
    else:  # the limit: first touch of as much memory
        import numpy as np

        def action() -> Any:
            arrays = [np.empty(t.size, np.float32) for t in weights.values()]
            for array in arrays:
                array.fill(0)
            return arrays

    begun = time.process_time()
    seconds, _kept = timed(action)
    return {"ms": seconds * 1e3, "cpu_ms": (time.process_time() - begun) * 1e3}


# The parent


def child(group: str, method: str, path: Path, threads: int, state: str) -> Result | None:
    if state == "warm":
        warm(str(path))
    elif state == "cold":
        cool(str(path))
    command = [sys.executable, __file__, "--one", group, method, str(path), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["?"])[-1]
        absent = re.search("ModuleNotFoundError: No module named '(.*)'", last)
        print(f"  {method:28} {f'{absent[1]} is not installed' if absent else last[:150]}")
        return None
    return json.loads(done.stdout)


def device_cases(files: dict[str, Path]) -> Iterator[tuple[Any, ...]]:
    """Those that need a GPU."""
    for state in ("warm", "cold"):
        for method in ("max-build to MAX", "max-build to cuda.core", "safetensors device=cuda"):
            yield f"to a GPU, {state}", "device", method, files["model"], 1, state


def cases(files: dict[str, Path], gguf_file: Path | None) -> Iterator[tuple[Any, ...]]:
    """(title, group, method, file, threads, state)."""
    for method in ("max-build", "safetensors", "MAX", "json, no checks"):
        yield "open 338 tensors", "open", method, files["model"], 1, "warm"
    for method in (
        "max-build", "max-build, memo", "max-build, memo by header", "max-build, all looked up",
        "max-build, memo, all looked up", "safetensors", "MAX", "json, no checks",
    ):  # fmt: skip
        yield "open 100,000 tensors", "open", method, files["many"], 1, "warm"
    for title, name in (("GGUF of 100,000 tensors", "many_gguf"), ("GGUF, 152k words", "vocab")):
        for method in ("max-build", "max-build, memo", "MAX", "gguf"):
            yield f"open {title}", "open", method, files[name], 1, "warm"
    if gguf_file:
        for method in ("max-build", "MAX", "gguf"):
            yield f"open {gguf_file.name}", "open", method, gguf_file, 1, "warm"
        for method in ("first touch alone", "gguf.quants", "max-build", "max-build, into MAX"):
            yield f"decode {gguf_file.name}", "decode", method, gguf_file, 1, "warm"
    peers = (
        "safetensors load_file", "torch load_file + clone", "MAX data() + copy",
        "readinto fresh memory", "fastsafetensors", "Run:ai streamer", "InstantTensor",
    )  # fmt: skip
    for threads in (1, 2):
        title = f"read warm, {threads} thread{'s' * (threads > 1)}"
        for method in ("plain preadv, 2 MiB", "max-build, 2 MiB", "max-build, 4 MiB"):
            yield title, "read", method, files["model"], threads, "warm"
    for method in peers:
        yield "read warm, peers", "read", method, files["model"], 2, "warm"
    for method in ("plain O_DIRECT, 4 MiB", "max-build, 4 MiB", "map, page by page", *peers):
        yield "read cold", "read", method, files["model"], 1, "cold"
    for method in ("max-build, map", "max-build, read", "safetensors load_file"):
        yield "100,000 tiny tensors, all bytes", "tiny", method, files["many"], 1, "warm"
    for method in ("max-build", "MAX data()"):
        yield "views into MAX", "views", method, files["model"], 1, "warm"
    yield "fingerprint, warm", "hash", "max-build", files["model"], 1, "warm"


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        group, method, path, threads = sys.argv[2:]
        run = {
            "open": measure_open,
            "tiny": measure_tiny,
            "views": measure_views,
            "hash": measure_hash,
            "device": measure_device,
            "decode": measure_decode,
        }
        if group == "read":
            print(json.dumps(measure_read(method, path, int(threads))), flush=True)
        else:
            print(json.dumps(run[group](method, path)), flush=True)
        os._exit(0)  # some peers abort at exit
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dir", type=Path, default=Path("build/bench-weights"))
    parser.add_argument("--size", type=float, default=1.0, help="of the model's file, in GB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--gguf", type=Path, help="a real GGUF file to open as well")
    parser.add_argument("--only", default="", help="run cases whose title has this word")
    parser.add_argument("--device", action="store_true", help="deliver to a GPU, and check it")
    parser.add_argument("--best", action="store_true", help="tell the best, on a busy machine")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, shown = [], ""
    print(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} CPUs")
    files = make_files(args.dir, args.size)
    wanted = device_cases(files) if args.device else cases(files, args.gguf)
    for title, group, method, path, threads, state in wanted:
        if args.only not in title:
            continue
        slow = method in ("gguf", "map, page by page") or (method == "MAX" and group == "open")
        if title != shown:
            shown = title
            print(f"\n{title}")
        runs = []
        for _ in range(min(args.repeat, 3) if slow else args.repeat):
            if (found := child(group, method, path, threads, state)) is None:
                break
            runs.append(found)
        if not runs:
            continue
        pick = BEST if args.best else dict.fromkeys(runs[0], statistics.median)
        middle = {key: pick.get(key, min)(run[key] for run in runs) for key in runs[0]}
        text = "  ".join(f"{key} {value:.3g}" for key, value in middle.items())
        print(f"  {method:28} {text}", flush=True)
        rows.append({"title": title, "method": method, "threads": threads, **middle})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
