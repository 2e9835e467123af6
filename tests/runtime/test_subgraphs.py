"""Weights of repeated blocks: a subgraph that is called once per layer, under a prefix each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from max_build.errors import WeightsError
from max_build.testing.fixtures import Artifacts
from support import write_project

GRAPH = """
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.nn import Module


class Scale(Module):
    def __init__(self):
        super().__init__()
        self.weight = Weight("layers.0.weight", DType.float32, [4], DeviceRef.CPU())

    def __call__(self, x):
        return x * self.weight


def build(target):
    row = TensorType(DType.float32, ["n", 4], DeviceRef.CPU())
    with Graph("layers", input_types=[row]) as graph:
        x = graph.inputs[0].tensor
        block = Scale().build_subgraph("block", inputs=[x], weight_prefix="layers.0.")
        for n in range(3):
            x = ops.call(block, x, prefix=f"layers.{n}.")[0].tensor
        graph.output(x + Weight("bias", DType.float32, [4], DeviceRef.CPU()))
    return graph
"""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    folder = tmp_path_factory.mktemp("layers")
    root = write_project(folder / "toy", graph=GRAPH)
    found = Artifacts(root, to_compile=(), cache_dir=str(folder / "cache"))
    yield found
    found.close()


@pytest.mark.slow
def test_each_call_takes_the_weights_of_its_own_prefix(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    tensors = {f"layers.{n}.weight": np.full(4, n + 2, np.float32) for n in range(3)}
    path = tmp_path / "w.safetensors"
    save_file({**tensors, "bias": np.ones(4, np.float32)}, path)
    (out,) = artifacts.model("affine", weights=path)(np.ones((1, 4), np.float32))
    assert out.to_numpy().tolist() == [[2 * 3 * 4 + 1] * 4]


@pytest.mark.slow
def test_a_layer_that_is_missing_is_told(artifacts: Artifacts, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"layers.0.weight": np.ones(4, np.float32), "bias": np.ones(4, np.float32)}, path)
    with pytest.raises(WeightsError) as caught:
        artifacts.model("affine", weights=path)
    assert "layers.1.weight" in str(caught.value)
    assert "layers.2.weight" in str(caught.value)
