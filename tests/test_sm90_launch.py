"""Loading and launching against a simulated driver: the bytes that reach it, what is cached, what is refused."""

import ctypes
import dataclasses
import enum
import hashlib
import importlib.machinery
import json
import struct
import sys
import threading
import types

import pytest
import torch
from scale_variant import SCALE

from flash_kda.sm90 import launch
from flash_kda.sm90.variants import ARCH, MANIFEST, SCHEMA, TRITON_VERSION

CUBIN = b"\x7fELF stands for a cubin"
SOURCE = b"the kernel's source\n"
SHARED_BYTES = 65544
DESCRIPTOR = {"block": [256, 1, 128], "box": [256, 1, 64], "element": "BFLOAT16", "element_bytes": 2, "swizzle": "128B"}
SIZES = [128, 4, 4, 4, 8, 8, 8] * 2 + [8, 8, 4, 8, 4] + [8, 8]
OFFSETS = [0, 128, 132, 136, 144, 152, 160, 192, 320, 324, 328, 336, 344, 352, 360, 368, 376, 384, 392, 400, 408]

X = (0x7000, (1000, 3, 128), (384, 128, 1))
Y = (0x9000, (1000, 3, 128), (1024, 256, 1))
SCALARS = (0x1234, 0x5670, 3, -(2**40), 0.5)


def entry():
    types_ = {
        **SCALE.signature,
        "x_desc": "tensordesc<bf16[256,1,128],...>",
        "y_desc": "tensordesc<bf16[256,1,128],...>",
    }
    arguments = [
        {"name": name, "type": type_, "aligned": name == "marks_ptr"}
        | ({"descriptor": DESCRIPTOR} if name.endswith("_desc") else {})
        for name, type_ in types_.items()
    ]
    return {
        "symbol": "scale_tile",
        "cubin": "scale.cubin",
        "cubin_sha256": hashlib.sha256(CUBIN).hexdigest(),
        "shared_bytes": SHARED_BYTES,
        "threads": 128,
        "arguments": arguments,
        "params": [{"offset": o, "bytes": b} for o, b in zip(OFFSETS, SIZES, strict=True)],
        "sources": {"scale_tile.py": hashlib.sha256(SOURCE).hexdigest()},
        "fingerprint": SCALE.fingerprint(),
    }


def manifest(**changes):
    return {
        "schema": SCHEMA,
        "arch": ARCH,
        "compiler": {"triton": TRITON_VERSION},
        "without_kernels": None,
        "kernels": {"scale": entry()},
        **changes,
    }


class Integer(int):
    """What cuda.bindings wraps in a type of its own: CUdevice, CUstream, ..."""


class FakeDriver(types.ModuleType):
    """As much of `cuda.bindings.driver` as a launch uses, with the real parameter counts; records every call."""

    class CUresult(enum.IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_INVALID_VALUE = 1
        CUDA_ERROR_INVALID_CONTEXT = 201
        CUDA_ERROR_NO_BINARY_FOR_GPU = 209

    CUstreamCaptureMode = enum.IntEnum("CUstreamCaptureMode", {"CU_STREAM_CAPTURE_MODE_GLOBAL": 0,
                                                             "CU_STREAM_CAPTURE_MODE_RELAXED": 2})  # fmt: skip
    CUfunction_attribute = enum.IntEnum("CUfunction_attribute", {
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8})  # fmt: skip
    CUtensorMapDataType = enum.IntEnum("CUtensorMapDataType", {"CU_TENSOR_MAP_DATA_TYPE_BFLOAT16": 9})
    CUtensorMapSwizzle = enum.IntEnum("CUtensorMapSwizzle", {"CU_TENSOR_MAP_SWIZZLE_128B": 3})
    CUtensorMapInterleave = enum.IntEnum("CUtensorMapInterleave", {"CU_TENSOR_MAP_INTERLEAVE_NONE": 0}, start=0)
    CUtensorMapL2promotion = enum.IntEnum("CUtensorMapL2promotion", {"CU_TENSOR_MAP_L2_PROMOTION_L2_128B": 2})
    CUtensorMapFloatOOBfill = enum.IntEnum("CUtensorMapFloatOOBfill", {"CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE": 0})
    CUlaunchAttributeID = enum.IntEnum("CUlaunchAttributeID", {
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": 6})  # fmt: skip
    CUlaunchAttribute = CUlaunchAttributeValue = CUlaunchConfig = types.SimpleNamespace
    CUdevice = CUfunction = CUkernel = CUstream = Integer

    def __init__(self):
        super().__init__("cuda.bindings.driver")
        self.calls = []
        self.launches = []
        self.fail = {}  # name of a call -> results to give before succeeding
        self.gate = None  # called inside each launch
        self.current_device = 0
        self.context = 1

    def _result(self, name, *values):
        self.calls.append(name)
        if self.fail.get(name):
            error = self.fail[name].pop(0)
            return (error, *(None for _ in values)) if error else (error, *values)
        return (self.CUresult.CUDA_SUCCESS, *values)

    def cuInit(self, flags):  # noqa: N802
        return self._result("cuInit")

    def cuDevicePrimaryCtxRetain(self, dev):  # noqa: N802
        return self._result("cuDevicePrimaryCtxRetain", f"context {int(dev)}")

    def cuCtxPushCurrent(self, ctx):  # noqa: N802
        return self._result("cuCtxPushCurrent")

    def cuCtxPopCurrent(self):  # noqa: N802
        return self._result("cuCtxPopCurrent", "context")

    def cuCtxGetCurrent(self):  # noqa: N802
        return self._result("cuCtxGetCurrent", Integer(self.context))

    def cuCtxSetCurrent(self, ctx):  # noqa: N802
        return self._result("cuCtxSetCurrent")

    def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        self.mode = mode
        return self._result("cuThreadExchangeStreamCaptureMode", self.CUstreamCaptureMode(0))

    def cuLibraryLoadData(  # noqa: N802
        self, code, jit_options, jit_values, num_jit_options, library_options, library_values, num_library_options
    ):
        assert code == CUBIN
        return self._result("cuLibraryLoadData", Integer(70))

    def cuLibraryGetKernel(self, library, name):  # noqa: N802
        assert (library, name) == (70, b"scale_tile")
        return self._result("cuLibraryGetKernel", Integer(71))

    def cuKernelSetAttribute(self, attrib, val, kernel, dev):  # noqa: N802
        self.attribute = (int(attrib), val, int(kernel), int(dev))
        return self._result("cuKernelSetAttribute")

    def cuKernelGetFunction(self, kernel):  # noqa: N802
        return self._result("cuKernelGetFunction", Integer(72))

    def cuGetProcAddress(self, symbol, cuda_version, flags):  # noqa: N802
        assert symbol == b"cuTensorMapEncodeTiled"
        number, words, longs = ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint64)
        pointer = ctypes.c_void_p
        types_ = (pointer, number, number, pointer, longs, longs, words, words, number, number, number, number)
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, *types_)(self.encode)
        return self._result("cuGetProcAddress", ctypes.cast(self._function, pointer).value, 0)

    def encode(self, target, element, rank, address, dims, pitches, box, steps, interleave, swizzle, promotion, fill):
        assert target % 64 == 0
        dims, pitches, box, steps = dims[:rank], pitches[: rank - 1], box[:rank], steps[:rank]
        self.encoded = (element, rank, address, dims, pitches, box, steps, interleave, swizzle, promotion, fill)
        ctypes.memmove(target, fake_map(address, dims, pitches), 128)
        return int(self._result("encode")[0])

    def cuLaunchKernel(self, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra):  # noqa: N802
        pointers = (ctypes.c_void_p * len(SIZES)).from_address(params)
        values = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, SIZES, strict=True)]
        if self.gate:
            self.gate()
        again = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, SIZES, strict=True)]
        assert values == again, "another thread wrote into the parameters of a launch"
        assert type(stream) is Integer
        result = self._result("cuLaunchKernel")
        if result[0] == 0:
            self.launches.append(((f, gx, gy, gz, bx, by, bz, shared, int(stream), extra), values))
        return result

    def cuLaunchKernelEx(self, config, f, params, extra):  # noqa: N802
        (attribute,) = config.attrs
        self.overlapped = (config.numAttrs, attribute.id, attribute.value.programmaticStreamSerializationAllowed)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        return self.cuLaunchKernel(f, *grid, *block, config.sharedMemBytes, config.hStream, params, extra)


def fake_map(address, dims, strides):
    return hashlib.sha512(repr((int(address), [*map(int, dims)], [*map(int, strides)])).encode()).digest() * 2


@pytest.fixture
def driver(monkeypatch):
    """A Hopper with this simulated driver; torch's device 0 and stream 0x55 are current."""
    fake = FakeDriver()
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = fake
    fake.__spec__ = importlib.machinery.ModuleSpec(fake.__name__, None)
    for name, module in {"cuda": types.ModuleType("cuda"), "cuda.bindings": bindings, fake.__name__: fake}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(launch, "_contexts", {})
    launch._encode_tiled.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: fake.current_device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x55 + device, raising=False)
    yield fake
    launch._encode_tiled.cache_clear()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps(manifest()))
    (tmp_path / "scale.cubin").write_bytes(CUBIN)
    (tmp_path / "scale_tile.py").write_bytes(SOURCE)
    return tmp_path


def library(folder, variants=(SCALE,)):
    return launch.KernelLibrary(folder, variants, folder)


def test_the_right_parameters_reach_the_driver(driver, folder):
    library(folder).kernel("scale").launch(0, (4, 3, 1), X, Y, *SCALARS)
    ((head, values),) = driver.launches
    assert head == (71, 4, 3, 1, 128, 1, 1, SHARED_BYTES, 0x55, 0)
    expected = b""
    for address, shape, strides in (X, Y):
        expected += fake_map(address, shape[::-1], [2 * stride for stride in strides[1::-1]])
        expected += struct.pack("<iii", *shape) + struct.pack("<qqq", *strides)
    expected += struct.pack("<QQ", 0x1234, 0x5670) + struct.pack("<i", 3) + struct.pack("<q", -(2**40))
    expected += struct.pack("<f", 0.5) + bytes(16)
    assert b"".join(values) == expected
    # innermost first; strides in bytes without the innermost; half a row a box
    assert driver.encoded == (9, 3, 0x9000, [128, 3, 1000], [512, 2048], [64, 1, 256], [1, 1, 1], 0, 3, 2, 0)
    assert driver.attribute == (8, SHARED_BYTES, 71, 0)


def test_an_overlapping_launch_differs_in_one_attribute(driver, folder):
    kernel = library(folder).kernel("scale")
    kernel.launch(0, (7, 2, 1), X, Y, *SCALARS)
    assert not hasattr(driver, "overlapped")
    kernel.launch(0, (7, 2, 1), X, Y, *SCALARS, overlap=True)
    assert driver.overlapped == (1, 6, 1)
    assert driver.launches[0] == driver.launches[1]
    kernel.launch(0, (3, 1, 1), X, Y, *SCALARS, overlap=True)
    assert driver.launches[2][0][1:4] == (3, 1, 1)


def test_a_repeated_launch_reaches_the_driver_like_the_first(driver, folder):
    kernel = library(folder).kernel("scale")
    record = []
    for overlap in (False, True):
        kernel.launch(0, (7, 2, 1), X, Y, *SCALARS, overlap=overlap, record=record)
    kernel.launch(0, (1, 1, 1), X, Y, 0, 0, 0, 0, 0.0)  # leaves other parameters behind
    assert (kernel.descriptors, kernel.pointers) == (2, {2, 3})
    for launched in record:
        assert launched.kernel is kernel
        views, rest = launched.arguments[:2], launched.arguments[2:]
        kernel.repeat(launched.device, launched.grid, kernel.block(0, views), rest, launched.overlap)
    assert driver.launches[3:] == driver.launches[:2]
    assert driver.calls.count("encode") == 2
    other = (X[0] + 32, *X[1:])
    kernel.repeat(0, (7, 2, 1), kernel.block(0, (other, Y)), SCALARS, False)
    kernel.launch(0, (7, 2, 1), other, Y, *SCALARS)
    assert driver.launches[-1] == driver.launches[-2]
    assert driver.launches[-1] != driver.launches[0]


def test_a_cubin_is_loaded_once_and_prepared_once_a_device(driver, folder, monkeypatch):
    entered = []

    class Guard:
        def __init__(self, device):
            entered.append(device)

        def __enter__(self):
            driver.current_device = 1

        def __exit__(self, *error):
            driver.current_device = 0

    monkeypatch.setattr(torch.cuda, "device", Guard)
    shelf = library(folder)
    kernel = shelf.kernel("scale")
    assert shelf.kernel("scale") is kernel
    for device in (0, 1, 0, 1):
        kernel.launch(device, (1, 1, 1), X, Y, *SCALARS)
    assert entered == [1, 1]
    assert [head[8] for head, _ in driver.launches] == [0x55, 0x56, 0x55, 0x56]
    counts = {name: driver.calls.count(name) for name in driver.calls}
    assert counts["cuLibraryLoadData"] == counts["cuLibraryGetKernel"] == 1
    assert counts["cuKernelSetAttribute"] == counts["cuKernelGetFunction"] == counts["cuDevicePrimaryCtxRetain"] == 2
    assert counts["cuCtxPushCurrent"] == counts["cuCtxPopCurrent"] == 2
    assert driver.mode == driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL  # as it was before loading
    assert counts["encode"] == 2  # the map of a tensor does not depend on the device


def test_tensor_maps_are_kept_for_what_determines_them_and_no_longer_than_allowed(driver, folder, monkeypatch):
    monkeypatch.setattr(launch, "MAPS_KEPT", 2)
    kernel = library(folder).kernel("scale")

    def encodes(x):
        before = driver.calls.count("encode")
        kernel.launch(0, (1, 1, 1), x, Y, *SCALARS)
        return driver.calls.count("encode") - before

    address, shape, strides = X
    assert encodes(X) == 2
    assert encodes(X) == 0
    assert encodes((address, torch.Size(shape), strides)) == 0
    assert encodes((address + 16, shape, strides)) == 1
    assert encodes((address, shape, (768, 128, 1))) == 1
    assert encodes((address, (999, 3, 128), strides)) == 1
    assert encodes((address, shape, (768, 128, 1))) == 0
    assert encodes(X) == 1  # of the three, encoded longest ago
    assert encodes(X) == 0
    assert [len(descriptor._kept) for descriptor in kernel._descriptors] == [2, 1]
    assert len(kernel._blocks) <= 2
    assert driver.launches[-1][1][0] == fake_map(address, shape[::-1], (256, 768))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X, Y, *SCALARS[:-1]), TypeError, "scale must get 7 arguments, got 6; they are x_desc, y_desc"),
        ((X, Y, *SCALARS, 1), TypeError, "must get 7 arguments, got 8"),
        ((X, Y, 0x1234, 0x5678, 3, 1, 0.5), ValueError, "marks_ptr must be a multiple of 16, got"),
        ((X, Y, 0x1234, 0x5670, 2**31, 1, 0.5), TypeError, "n_heads must fit i32, got 2147483648"),
        ((X, Y, -1, 0x5670, 3, 1, 0.5), TypeError, "bias_ptr must fit"),
        ((X, Y, 0x1234, 0x5670, 3, 1.5, 0.5), TypeError, "first_row must fit i64, got 1.5"),
        ((X, [0x9000, (1, 1, 128), (1, 1, 1)], *SCALARS), TypeError, "y_desc must be a tuple"),
        ((X, 0x9000, *SCALARS), TypeError, "y_desc must be a tuple"),
        ((X, (0x9008, *Y[1:]), *SCALARS), ValueError, "y_desc must start at a multiple of 16 bytes"),
        ((X, (0x9000, Y[1], (1024, 256, 2)), *SCALARS), ValueError, "y_desc must .* last stride 1"),
        ((X, (0x9000, Y[1], (1023, 256, 1)), *SCALARS), ValueError, "multiples of 16 bytes"),
        ((X, (0x9000, Y[1], (0, 256, 1)), *SCALARS), ValueError, "positive"),
        ((X, (0x9000, (0, 3, 128), Y[2]), *SCALARS), ValueError, "y_desc must have sizes from 1"),
        ((X, (0x9000, (3, 128), (128, 1)), *SCALARS), ValueError, "y_desc must have 3 dimensions"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_and_nothing_is_launched(driver, folder, arguments, error, message):
    kernel = library(folder).kernel("scale")
    with pytest.raises(error, match=message):
        kernel.launch(0, (1, 1, 1), *arguments)
    assert driver.launches == []
    kernel.launch(0, (1, 1, 1), X, Y, *SCALARS)  # and the kernel still works
    assert len(driver.launches) == 1


def test_the_stride_of_a_dimension_of_size_one_may_be_anything(driver, folder):
    library(folder).kernel("scale").launch(0, (1, 1, 1), X, (0x9000, (1, 1, 128), (7, 3, 1)), *SCALARS)
    assert driver.encoded[4] == [16, 16]
    assert driver.launches[0][1][11:14] == [struct.pack("<q", stride) for stride in (7, 3, 1)]


def test_a_thread_without_a_context_gets_one_to_encode_and_to_launch(driver, folder):
    kernel = library(folder).kernel("scale")
    driver.context = 0
    kernel.launch(0, (1, 1, 1), X, Y, *SCALARS)
    assert [call for call in driver.calls if call != "cuGetProcAddress"][-5:] == [
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
        "encode",
        "encode",
        "cuLaunchKernel",
    ]
    driver.fail["cuLaunchKernel"] = [driver.CUresult.CUDA_ERROR_INVALID_CONTEXT]
    kernel.launch(0, (1, 1, 1), X, Y, *SCALARS)
    assert driver.calls[-4:] == ["cuLaunchKernel", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuLaunchKernel"]
    assert len(driver.launches) == 2


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuKernelSetAttribute", "encode", "cuLaunchKernel"])
def test_a_driver_error_is_reported_and_does_not_stick(driver, folder, call):
    kernel = library(folder).kernel("scale")
    driver.fail[call] = [driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU]
    with pytest.raises(launch.KernelError, match="CUDA_ERROR_NO_BINARY_FOR_GPU") as caught:
        kernel.launch(0, (2, 1, 1), X, Y, *SCALARS)
    assert "scale" in caught.value.cause or "x_desc" in caught.value.cause
    assert caught.value.remedy
    assert driver.calls.count("cuCtxPushCurrent") == driver.calls.count("cuCtxPopCurrent")
    kernel.launch(0, (2, 1, 1), X, Y, *SCALARS)
    assert len(driver.launches) == 1


def test_threads_do_not_mix_their_parameters(driver, folder):
    kernel = library(folder).kernel("scale")
    driver.gate = lambda: threading.Event().wait(0.0005)
    errors = []

    def work(number):
        try:
            for _ in range(20):
                kernel.launch(0, (number, 1, 1), (X[0] + 16 * number, *X[1:]), Y, 0, 16 * number, number, 0, 0.0)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(driver.launches) == 160
    for head, values in driver.launches:
        assert values[15] == struct.pack("<Q", 16 * head[1])
        assert values[16] == struct.pack("<i", head[1])
        assert values[0] == fake_map(X[0] + 16 * head[1], X[1][::-1], (256, 768))


def spoil_manifest(folder, **changes):
    (folder / MANIFEST).write_text(json.dumps(manifest(**changes)))


CHANGED = dataclasses.replace(SCALE, num_warps=8)


@pytest.mark.parametrize(
    ("spoil", "variants", "cause", "remedy"),
    [
        (lambda f: (f / MANIFEST).unlink(), (SCALE,), "never built", "python -m flash_kda.sm90.build"),
        (lambda f: (f / MANIFEST).write_text("{"), (SCALE,), "cannot be read", "rebuild"),
        (lambda f: spoil_manifest(f, schema=0), (SCALE,), "is not a schema", "rebuild"),
        (lambda f: spoil_manifest(f, arch="sm_100a"), (SCALE,), "is not a schema . manifest for sm_90a", "rebuild"),
        (
            lambda f: spoil_manifest(f, without_kernels="of the weather"),
            (SCALE,),
            "because of the weather",
            "reinstall",
        ),
        (lambda f: spoil_manifest(f, kernels={}), (SCALE,), "no kernel 'scale' was built", "rebuild"),
        (lambda f: (f / "scale.cubin").unlink(), (SCALE,), "cannot be read", "rebuild"),
        (lambda f: (f / "scale.cubin").write_bytes(b"x"), (SCALE,), "is not the cubin that", "rebuild"),
        (lambda f: (f / "scale_tile.py").write_bytes(b"x"), (SCALE,), "stale: scale_tile.py changed", "rebuild"),
        (lambda f: None, (CHANGED,), "stale: its variant changed", "rebuild"),
    ],
)
def test_cubins_that_are_not_there_or_not_right_are_refused_with_a_remedy(driver, folder, spoil, variants, cause, remedy):
    spoil(folder)
    with pytest.raises(launch.KernelError, match=cause) as caught:
        library(folder, variants).kernel("scale")
    assert remedy in caught.value.remedy
    reason = library(folder, variants).available(0)
    assert reason == str(caught.value) == f"{caught.value.cause}; {caught.value.remedy}"


def test_an_installation_without_sources_is_not_stale(driver, folder):
    (folder / "scale_tile.py").unlink()
    assert library(folder).available(0) is None
    library(folder).kernel("scale").launch(0, (1, 1, 1), X, Y, *SCALARS)


def test_another_architecture_is_refused(driver, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    shelf = library(folder)
    with pytest.raises(launch.KernelError, match=r"built for sm_90a .*device 0 is sm_100"):
        shelf.kernel("scale").launch(0, (1, 1, 1), X, Y, *SCALARS)
    assert "device 0 is sm_100" in shelf.available(0)
    assert "cuLibraryLoadData" not in driver.calls
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert shelf.available(torch.device("cuda", 0)) is None


def test_missing_bindings_are_named(driver, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    monkeypatch.delattr(sys.modules["cuda.bindings"], "driver")
    with pytest.raises(launch.KernelError, match=r"cuda\.bindings cannot be used.*pip install cuda-bindings"):
        library(folder).kernel("scale")
    assert (
        library(folder).available(0)
        == "cuda.bindings cannot be used: it is not installed; install it: pip install cuda-bindings"
    )
    monkeypatch.delitem(sys.modules, "cuda.bindings.driver")
    monkeypatch.delitem(sys.modules, "cuda.bindings")
    assert "it is not installed" in library(folder).available(0)  # `cuda` is there and no package


def test_available_gives_reasons_and_never_raises(driver, folder, monkeypatch):
    shelf = library(folder)
    assert shelf.available(0) is shelf.available(torch.device("cuda:0")) is None
    assert "cpu" in shelf.available(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert shelf.available() is None
    assert "ships no Hopper kernels" in library(folder, ()).available(0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: 1 // 0)
    assert shelf.available(0) is None  # remembered
    assert "division" in shelf.available(7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no CUDA device" in library(folder).available()


def test_the_installed_library_answers_on_this_machine():
    """Whatever this machine has: a reason or None, and no exception."""
    assert launch.available() is None or isinstance(launch.available(), str)


def test_the_simulated_driver_is_like_the_real_one():
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    fake = FakeDriver()
    for name in [name for name in dir(FakeDriver) if name[:2] in ("cu", "CU")]:
        assert hasattr(real, name), name
        if isinstance(getattr(fake, name), type) and issubclass(getattr(fake, name), enum.Enum):
            for member in getattr(fake, name):
                assert int(getattr(getattr(real, name), member.name)) == member, member
        elif name[:2] == "cu":
            signature = getattr(real, name).__doc__.splitlines()[0]
            count = signature.count(",") + 1 if "()" not in signature else 0
            code = getattr(FakeDriver, name).__code__
            assert code.co_argcount - 1 == count or "tuple" in signature, signature
