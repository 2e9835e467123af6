"""The Triton kernel, run by Triton's interpreter, against NumPy."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

from numpy_tensor import Tensor


@pytest.fixture
def softmax_rows(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop("rowops.softmax", None)
    yield importlib.import_module("rowops.softmax").softmax_rows
    sys.modules.pop("rowops.softmax", None)


@pytest.mark.parametrize(("rows", "columns", "block"), [(3, 5, 8), (4, 256, 256), (2, 200, 256)])
def test_rows_sum_to_one_and_agree_with_numpy(softmax_rows, rows, columns, block):
    x = np.random.default_rng(7).normal(0, 5, (rows, columns)).astype(np.float32)
    out = np.full_like(x, np.nan)
    softmax_rows[(rows,)](Tensor(out), Tensor(x), columns, columns, BLOCK=block)
    exact = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out, exact, atol=1e-6)
    np.testing.assert_allclose(out.sum(axis=1), 1, atol=1e-5)


def test_large_values_do_not_overflow(softmax_rows):
    x = np.array([[1e30, 1e30, -1e30]], np.float32)
    out = np.empty_like(x)
    softmax_rows[(1,)](Tensor(out), Tensor(x), 3, 3, BLOCK=4)
    np.testing.assert_allclose(out, [[0.5, 0.5, 0.0]], atol=1e-6)
