"""Whether cuFile is used: the rules, for machines that are not here; and what is told here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from weights_files import Gguf, safetensors, tensors

from max_build.errors import WeightsError
from max_build.machine import Mount
from max_build.weights import cuda_buffers, open_weights
from max_build.weights.gds import VARIABLE, Facts, gds_reason, refusal

NVME = "/sys/devices/pci0000:00/0000:00:1d.0/nvme/nvme0/nvme0n1/nvme0n1p2"


def facts(
    kind: str = "ext4",
    *options: str,
    disk: str = NVME,
    module: bool = True,
    asked: bool = True,
) -> Facts:
    return Facts(module, Mount(kind, frozenset(options)), disk, asked)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (facts(), ""),
        (facts("xfs", "rw"), ""),
        (facts("ext4", "rw", "data=ordered"), ""),
        (facts("nfs4", "proto=rdma", disk=""), ""),
        (facts("lustre", disk=""), ""),
        (facts("ext4", "data=journal"), "not mounted with ordered data"),
        (facts("ext4", disk="/sys/devices/pci0/virtio3/block/vda"), "not on an NVMe disk"),
        (facts("xfs", disk=""), "not on an NVMe disk"),
        (facts("nfs", "proto=tcp", disk=""), "does not use RDMA"),
        (facts("overlay"), "does not read overlay filesystems directly"),
        (facts("", disk=""), "does not read unknown filesystems directly"),
        (facts(module=False), "`nvidia-fs` is not loaded"),
        (facts(asked=False), "`MAX_BUILD_GDS=1` does not ask for it"),
        (facts("overlay", module=False, asked=False), "overlay"),
        (facts(module=False, asked=False), "nvidia-fs"),
    ],
)
def test_the_first_obstacle_is_told(given: Facts, reason: str) -> None:
    found = refusal(given)
    assert reason in found
    assert bool(reason) == bool(found)


def test_what_nobody_asked_for_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "x"
    path.touch()
    assert gds_reason(str(path))
    path.unlink()
    assert "unknown filesystems" in gds_reason(str(path))


def test_a_kernel_gets_only_bytes_that_the_file_has(tmp_path: Path) -> None:
    header, data = tensors(a=("F32", [2]), none=("F32", [0, 3]))
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors(header, data))
    with pytest.raises(WeightsError, match="tensors 'none' have no bytes in the file"):
        cuda_buffers(open_weights(path))
    swapped = tmp_path / "x.gguf"
    values = np.ones(4, ">f4")
    swapped.write_bytes(Gguf(order=">").tensor("w", [4], 0, values.tobytes()).build())
    with pytest.raises(WeightsError, match="tensors 'w' have no bytes"):
        cuda_buffers(open_weights(swapped))
