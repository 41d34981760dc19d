"""Owns the tests of reading callers' arrays: addresses, temporaries, refusals, and outputs beside inputs."""

from __future__ import annotations

import array as stdlib_array
import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gfkernels.arrays import empty_like, fast, inspect, overlap_check
from gfkernels.arrays.host import may_self_overlap
from gfkernels.errors import UsageError
from gfkernels.types import DTYPES


def written(address: int, nbytes: int) -> None:
    """Stands in for the data plane: adds one to every byte."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    for i in range(nbytes):
        memory[i] = (memory[i] + 1) % 256


class Interface:
    """An array of no framework that only has `__array_interface__`."""

    def __init__(self, array: np.ndarray[Any, Any], **changes: Any) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


class Dlpack:
    """An array of no framework that only has DLPack, of the version its producer speaks."""

    def __init__(self, array: np.ndarray[Any, Any], *, old: bool = False, device: tuple[int, int] = (1, 0)) -> None:
        self.array: Any = array
        self.old, self.device = old, device

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (3, 0, 2)])
def test_a_contiguous_array_is_used_where_it_is(name: str, shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, DTYPES[name].numpy)
    seen = inspect(x)
    assert seen.address == x.__array_interface__["data"][0]
    assert (seen.count, seen.shape, seen.nbytes, seen.dtype) == (x.size, shape, x.nbytes, DTYPES[name])
    assert seen.staging is None
    assert seen.result() is x
    assert seen.framework == "numpy"


STRIDED: dict[str, Callable[[Any], Any]] = {
    "step": lambda a: a[::2],
    "reversed": lambda a: a[::-1],
    "transposed": lambda a: a.reshape(6, 4).T,
    "fortran": lambda a: np.asfortranarray(a.reshape(6, 4)),
    "columns": lambda a: a.reshape(6, 4)[:, 1:3],
    "negative": lambda a: a.reshape(2, 3, 4)[::-1, :, ::-1],
}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("kind", STRIDED)
def test_a_strided_array_goes_through_a_temporary_and_is_written_back(kind: str, name: str) -> None:
    base = np.arange(24).astype(DTYPES[name].numpy)
    x = STRIDED[kind](base)
    before = x.copy()
    seen = inspect(x)
    assert seen.staging is not None and seen.address == seen.staging.ctypes.data
    assert seen.staging.tobytes() == before.tobytes()
    written(seen.address, seen.nbytes)
    assert x.tobytes() == before.tobytes()
    seen.finish()
    expected = np.frombuffer(before.tobytes(), np.uint8) + np.uint8(1)
    assert x.tobytes() == expected.tobytes()


def test_elements_between_those_of_a_strided_array_are_left_alone() -> None:
    base = np.zeros(10, np.float32)
    seen = inspect(base[::2])
    seen.staging[...] = 7
    seen.finish()
    assert base.tolist() == [7, 0] * 5


def test_refresh_takes_the_present_values() -> None:
    x = np.zeros((4, 4), np.float32).T[1:]
    seen = inspect(x)
    x[...] = 3
    seen.refresh()
    assert np.all(seen.staging == 3)


def test_an_input_is_never_written() -> None:
    base = np.zeros(10, np.float32)
    base.flags.writeable = False
    seen = inspect(base[::2], writable=False)
    seen.staging[...] = 7
    seen.finish()
    assert not base.any()


def test_an_unaligned_array_goes_through_a_temporary() -> None:
    raw = np.zeros(41, np.uint8)
    x = raw[1:].view(np.float32)
    seen = inspect(x)
    assert seen.address % 4 == 0 and seen.staging is not None
    seen.staging[...] = 2
    seen.finish()
    assert x.tolist() == [2] * 10


def read_only() -> np.ndarray[Any, Any]:
    x = np.zeros(3, np.float32)
    x.flags.writeable = False
    return x


REFUSED: dict[str, tuple[Any, str]] = {
    "read-only": (read_only(), r"read-only.*x\.copy\(\).*out="),
    "masked": (np.ma.zeros(3), r"masked.*filled"),
    "object": (np.zeros(3, object), "object.*astype"),
    "structured": (np.zeros(3, [("a", "f4")]), "structured.*fields"),
    "record": (np.rec.array([(1.0,)], dtype=[("a", "f4")]), "structured"),
    "complex": (np.zeros(3, complex), "complex128.*real and imaginary"),
    "foreign": (np.zeros(3, ">f4" if np.little_endian else "<f4"), "byte order.*newbyteorder"),
    "longdouble": (np.zeros(3, np.longdouble), "not supported; supported: float64"),
    "float8": (np.zeros(3, ml_dtypes.float8_e4m3fn), "float8_e4m3fn.*not supported"),
    "int4": (np.zeros(3, ml_dtypes.int4), "int4.*not supported"),
    "datetime": (np.zeros(3, "M8[s]"), "datetime64.*not supported"),
    "text": (np.zeros(3, "U4"), "not supported"),
    "scalar": (np.float32(3), r"numpy scalar \(float32\).*numpy\.array"),
    "bfloat16 scalar": (ml_dtypes.bfloat16(3), "pass an array: numpy.array"),
    "list": ([1.0, 2.0], r"list, not an array.*numpy\.array"),
    "float": (1.0, "float, not an array"),
    "None": (None, "NoneType, not an array"),
    "buffer": (stdlib_array.array("f", [1.0]), r"not an array.*numpy\.asarray"),
    "interface of bytes": (Interface(np.zeros(3), data=b"\0" * 24), "copy of its data"),
    "interface, masked": (Interface(np.zeros(3), mask=np.zeros(3, bool)), "masked"),
    "interface, read-only": (Interface(np.zeros(3), data=(np.zeros(3).ctypes.data, True)), "read-only"),
    "interface, raw": (Interface(np.zeros(3), typestr="|V8", descr=[("", "|V8")]), "not supported"),
    "dlpack, read-only": (Dlpack(read_only()), "read-only"),
    "dlpack, CUDA": (Dlpack(np.zeros(3), device=(2, 0)), "CUDA arrays are not supported in this build"),
    "dlpack, elsewhere": (Dlpack(np.zeros(3), device=(8, 0)), "DLPack device type 8"),
    "dlpack, complex": (Dlpack(np.zeros(3, complex)), "DLPack dtype.*not supported"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_name_the_argument_the_reason_and_the_remedy(kind: str) -> None:
    x, pattern = REFUSED[kind]
    with pytest.raises(UsageError, match=pattern):
        inspect(x)
    with pytest.raises(UsageError, match=r"arrays\[3\]"):
        inspect(x, role="arrays[3]")


def test_cuda_arrays_are_refused_by_their_interface() -> None:
    class Device:
        __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012

    with pytest.raises(UsageError, match="CUDA arrays are not supported in this build: x is a Device"):
        inspect(Device())


def test_self_overlapping_arrays_are_refused_as_targets_and_read_as_inputs() -> None:
    windows = np.lib.stride_tricks.as_strided(np.arange(5, dtype=np.float32), (4, 2), (4, 4))
    repeated = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (3,), (0,))
    for x in (windows, repeated):
        with pytest.raises(UsageError, match=r"same address.*shape.*strides"):
            inspect(x)
    assert inspect(windows, writable=False).staging.tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert inspect(np.broadcast_to(np.float32(2), (3,)), writable=False).staging.tolist() == [2, 2, 2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-30, 30)), max_size=3))
def test_self_overlap_is_never_missed(axes: list[tuple[int, int]]) -> None:
    shape, strides = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    seen: set[int] = set()
    overlaps = False
    for index in np.ndindex(*shape):
        start = sum(i * s for i, s in zip(index, strides, strict=True))
        element = set(range(start, start + 4))
        overlaps = overlaps or bool(seen & element)
        seen |= element
    assert may_self_overlap(shape, strides, 4) or not overlaps


def test_an_interface_without_numpy_is_used_where_it_is() -> None:
    array = np.zeros((2, 3), np.int16)
    x = Interface(array)
    seen = inspect(x)
    assert seen.address == array.ctypes.data and seen.result() is x and seen.shape == (2, 3)


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_is_read_in_both_versions(old: bool) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = Dlpack(array, old=old)
    seen = inspect(x)
    assert seen.address == array.ctypes.data and seen.result() is x and seen.dtype is DTYPES["float32"]
    strided = inspect(Dlpack(array[:, 1:3], old=old))
    assert strided.staging.tolist() == array[:, 1:3].tolist()
    strided.staging[...] = 9
    strided.finish()
    assert array[:, 1:3].tolist() == [[9, 9]] * 3 and array[0, 0] == 0


def test_dlpack_memory_lives_as_long_as_what_was_seen() -> None:
    class Owner(np.ndarray[Any, Any]):
        pass

    import gc
    import weakref

    array = np.zeros(10, np.float32).view(Owner)
    gone = weakref.ref(array)
    seen = inspect(Dlpack(array))
    seen.original.array = None
    del array
    gc.collect()
    assert gone() is not None
    del seen
    gc.collect()
    assert gone() is None


def test_out_must_match() -> None:
    x = inspect(np.zeros((2, 3), np.float32), writable=False)
    with pytest.raises(UsageError, match=r"shape \(3, 2\).*\(2, 3\)"):
        overlap_check(x, inspect(np.zeros((3, 2), np.float32), role="out"))
    with pytest.raises(UsageError, match=r"float64.*float32"):
        overlap_check(x, inspect(np.zeros((2, 3)), role="out"))
    assert not overlap_check(x, inspect(np.zeros((4, 2, 3), np.float32), role="out"), (4, 2, 3))


def test_out_may_be_x_or_apart_from_it_but_not_in_part() -> None:
    base = np.zeros(20, np.float32)

    def check(x: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> bool:
        return overlap_check(inspect(x, writable=False), inspect(out, role="out"), out.shape)

    assert check(base, base)
    assert check(base[:], base.reshape(20))
    assert check(base[::2], base[::2])
    assert not check(base[:10], base[10:])
    assert not check(base[::2], base[1::2])
    assert not check(base[:0], base[:0])
    for x, out in (
        (base[:10], base[5:15]),
        (base, base[::-1]),
        (base[:10], base[:5]),
        (base[:16].reshape(4, 4), base[:16].reshape(4, 4).T),
    ):
        with pytest.raises(UsageError, match="shares part of the memory"):
            check(x, out)


def test_empty_like_gives_an_array_of_the_same_kind() -> None:
    seen = empty_like(inspect(np.zeros((2, 3), ml_dtypes.bfloat16)), (4, 2))
    result = seen.result()
    assert type(result) is np.ndarray and result.shape == (4, 2) and result.dtype == ml_dtypes.bfloat16
    assert seen.address == result.ctypes.data


def test_the_fast_reader_agrees_with_numpy_here() -> None:
    import sysconfig

    assert fast.layout_ok() is not bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    x = np.zeros((3, 4), np.float32)
    assert ctypes.c_int64.from_address(id(x) + fast.DATA).value == x.ctypes.data


def test_the_fast_reader_is_off_where_a_field_lies_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    fast.layout_ok.cache_clear()
    monkeypatch.setattr(fast, "STRIDES", fast.DIMENSIONS)
    assert not fast.layout_ok()
    fast.layout_ok.cache_clear()
