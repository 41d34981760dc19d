"""Owns the tests of torch tensors: their memory, version counters, and torch's own rules for writing in place."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from gfkernels.arrays import empty_like, inspect, overlap_check
from gfkernels.errors import UsageError
from gfkernels.types import DTYPES

torch: Any = pytest.importorskip("torch", reason="torch is not installed: nothing about its tensors is tested")


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_used_where_it_is(name: str) -> None:
    x = torch.zeros((2, 3), dtype=getattr(torch, name))
    seen = inspect(x)
    assert (seen.address, seen.shape, seen.count, seen.dtype.name) == (x.data_ptr(), (2, 3), 6, name)
    assert seen.framework == "torch" and seen.result() is x


def test_writing_counts_a_version_so_that_autograd_notices() -> None:
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    loss = (weight * x).sum()
    version = x._version
    inspect(x).finish()
    assert x._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_input_counts_no_version() -> None:
    x = torch.ones(3)
    inspect(x, writable=False).finish()
    assert x._version == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_tensors_are_written_back(dtype: Any) -> None:
    base = torch.zeros((4, 6), dtype=dtype)
    for x in (base.t(), base[:, ::2], torch.zeros((2, 3, 4, 4)).to(memory_format=torch.channels_last)):
        version = x._version
        seen = inspect(x)
        assert seen.address == seen.staging.data_ptr() and seen.staging.is_contiguous()
        seen.staging.fill_(5)
        seen.finish()
        assert torch.all(x == 5) and x._version == version + 1
    assert base[0, 0] == 5


def test_refresh_takes_the_present_values() -> None:
    x = torch.zeros((3, 4)).t()
    seen = inspect(x)
    x.fill_(2)
    seen.refresh()
    assert torch.all(seen.staging == 2)


def test_requires_grad_needs_no_grad_mode() -> None:
    leaf = torch.nn.Parameter(torch.zeros(3))
    for x in (leaf, leaf * 2, leaf[1:]):
        with pytest.raises(UsageError, match=r"detach\(\).*no_grad\(\)"):
            inspect(x)
    inspect(leaf.detach()).finish()
    assert leaf._version == 1
    with torch.no_grad():
        inspect(leaf).finish()
        strided = torch.nn.Parameter(torch.zeros(3, 4).t())
        seen = inspect(strided)
        seen.staging.fill_(1)
        seen.finish()
    assert torch.all(strided == 1) and type(seen.staging) is torch.Tensor
    assert inspect(leaf, writable=False).address == leaf.data_ptr()


def test_inference_tensors_follow_torchs_rule() -> None:
    with torch.inference_mode():
        x = torch.zeros(3)
        inspect(x).finish()
    with pytest.raises(UsageError, match=r"inference_mode\(\).*clone"):
        inspect(x)


def test_refusals() -> None:
    cases = [
        (torch.eye(3).to_sparse(), r"sparse.*to_dense\(\)"),
        (torch.zeros(3, dtype=torch.complex64), "complex64.*not supported"),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), "float8_e4m3fn.*not supported"),
        (torch.zeros(3, device="meta"), r"device meta.*cpu\(\)"),
        (torch.zeros(1).expand(4), r"same address \(shape \(4,\), strides \(0,\)\).*contiguous"),
        (torch.zeros(6).as_strided((3, 3), (1, 1)), "same address"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "resolve_neg"),
    ]
    for x, pattern in cases:
        with pytest.raises(UsageError, match=pattern):
            inspect(x)
    assert inspect(torch.ones(1).expand(4), writable=False).staging.tolist() == [1, 1, 1, 1]


@pytest.mark.slow
def test_tensors_without_memory_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.zeros(3)
        with pytest.raises(UsageError, match="no memory of its own"):
            inspect(x)


def test_empty_and_scalar_tensors() -> None:
    assert inspect(torch.zeros(0, 3)).count == 0
    assert inspect(torch.tensor(3.0)).shape == ()
    inspect(torch.zeros(0, 3)).finish()


def test_out_beside_x() -> None:
    import numpy as np

    x = torch.zeros(10)
    assert overlap_check(inspect(x), inspect(x, role="out"))
    assert overlap_check(inspect(x), inspect(x.numpy(), role="out"))
    assert not overlap_check(inspect(x), inspect(np.zeros(10, np.float32), role="out"))
    with pytest.raises(UsageError, match="shares part"):
        overlap_check(inspect(x[:5]), inspect(x.numpy()[2:7], role="out"))
    result = empty_like(inspect(x.bfloat16()), (2, 5)).result()
    assert result.shape == (2, 5) and result.dtype is torch.bfloat16


def test_torch_is_never_imported_for_others() -> None:
    code = "import sys, numpy, gfkernels.arrays as a; a.inspect(numpy.zeros(3)); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
