"""Load cubins and launch them through cuda.bindings: no Triton, no compiling, nothing to wait for on a first call.

    manifest + cubin + (device, grid, arguments) -> one cuLaunchKernel on torch's current stream

A launch costs host time on every call, so all that can be done once is: a kernel's parameter block and the array of
pointers into it are allocated when it is loaded, one `struct` call fills the block, and encoded tensor maps are kept
for what determines them (address, shape, strides). A lock a kernel guards its block; the driver copies it at launch.

What cannot run says why. `available` gives the reason without raising, for a dispatcher or a report; everything else
raises `KernelError` with cause and remedy. Nothing falls back to anything.

    kernel = launch.kernel("forward")
    kernel.launch(device, (grid_x, 1, 1), (q.data_ptr(), q.shape, q.stride()), ..., beta.data_ptr(), n_items, scale)
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import json
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .variants import ARCH, CAPABILITY, CUBINS, MANIFEST, SCHEMA, VARIANTS, Variant

SOURCE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the package; the manifest names source files relative to it."""

MAPS_KEPT = 256
"""Tensor maps kept for each descriptor argument of a kernel; the least recently used one goes first."""

STREAMS_KEPT = 128
"""Stream handles kept as cuda.bindings wants them; past that all are made anew."""

_REBUILD = "rebuild them: python -m flash_kda.sm90.build, or pip install -e ."
_REINSTALL = "reinstall on Linux (x86-64 or aarch64) with CPython 3.10-3.14: pip install --force-reinstall ."
_DEFAULT_DYNAMIC_SHARED = 48 * 1024  # more has to be asked for, kernel by kernel and device by device
_SCALAR_CODES = {
    "i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip

TensorView = tuple[int, Sequence[int], Sequence[int]]
"""What a descriptor argument is launched with: (data_ptr, shape, strides in elements), all hashable."""


class Launched(NamedTuple):
    """A launch that was made; fields as in :meth:`Kernel.launch`."""

    kernel: Kernel
    device: int
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    overlap: bool


class KernelError(RuntimeError):
    """A kernel cannot be loaded or launched; the message is `cause; remedy`."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}; {remedy}")
        self.cause = cause
        self.remedy = remedy


class KernelLibrary:
    """The cubins of one folder, loaded when first asked for and kept for the life of the process.

    Args:
        directory: holds `manifest.json` and the cubins.
        variants: what the folder should hold. A variant that changed since the build is stale.
        source_root: where the manifest's source paths start. A file that is there and differs from what was compiled
            makes its kernels stale; one that is absent does not.
    """

    def __init__(
        self, directory: Path = CUBINS, variants: Sequence[Variant] = VARIANTS, source_root: Path = SOURCE_ROOT
    ) -> None:
        self.directory = directory
        self._variants = {variant.name: variant for variant in variants}
        self._source_root = source_root
        self._lock = threading.RLock()
        self._kernels: dict[str, Kernel] = {}
        self._usable: set[int] = set()

    @functools.cached_property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest as built.

        Raises:
            KernelError: there is none, it cannot be read, or another version of the package wrote it.
        """
        path = self.directory / MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise KernelError(f"the Hopper kernels were never built: {path} is missing", _REBUILD) from None
        except (OSError, ValueError) as error:
            raise KernelError(f"{path} cannot be read ({error})", _REBUILD) from error
        if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA or manifest.get("arch") != ARCH:
            raise KernelError(f"{path} is not a schema {SCHEMA} manifest for {ARCH}", _REBUILD)
        return manifest

    def kernel(self, name: str) -> Kernel:
        """The kernel `name`, read and checked at the first call; its cubin reaches a device when it first runs there.

        Raises:
            KernelError: not built, stale, damaged, or cuda.bindings is missing.
        """
        kernel = self._kernels.get(name)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(name)
                if kernel is None:
                    entry = self._checked_entry(name)
                    kernel = self._kernels[name] = Kernel(name, entry, self._cubin(name, entry))
        return kernel

    def available(self, device: int | torch.device | None = None) -> str | None:
        """Why the kernels cannot run on `device` (None: the current one), or None if they can. Never raises.

        The first positive answer for a device reads and hashes the kernels' sources and cubins, well under a
        millisecond a kernel, and is remembered; a negative one is looked for again.
        """
        try:
            index = _device_index(device)
            if index not in self._usable:
                for name in self._variants:
                    self._cubin(name, self._checked_entry(name))
                if not self._variants:
                    raise KernelError("this version ships no Hopper kernels", "use the reference implementation")
                _check_device(index)
                _find_bindings()
                self._usable.add(index)
        except Exception as error:  # a probe: whatever is wrong is the answer
            return str(error) or type(error).__name__
        return None

    def _checked_entry(self, name: str) -> Mapping[str, Any]:
        manifest = self.manifest
        if reason := manifest["without_kernels"]:
            raise KernelError(f"flash_kda was built without its Hopper kernels because {reason}", _REINSTALL)
        variant, entry = self._variants.get(name), manifest["kernels"].get(name)
        if entry is None:
            raise KernelError(f"no kernel {name!r} was built, only {sorted(manifest['kernels'])}", _REBUILD)
        if variant is None or variant.fingerprint() != entry["fingerprint"]:
            raise KernelError(f"the cubin of {name!r} is stale: its variant changed since it was built", _REBUILD)
        for relative, expected in entry["sources"].items():
            try:
                found = hashlib.sha256((self._source_root / relative).read_bytes()).hexdigest()
            except OSError:
                continue  # an installation without sources has nothing to be stale against
            if found != expected:
                raise KernelError(f"the cubin of {name!r} is stale: {relative} changed since it was built", _REBUILD)
        return dict(entry)

    def _cubin(self, name: str, entry: Mapping[str, Any]) -> bytes:
        path = self.directory / str(entry["cubin"])
        try:
            cubin = path.read_bytes()
        except OSError as error:
            raise KernelError(f"the cubin of {name!r} cannot be read ({error})", _REBUILD) from error
        if hashlib.sha256(cubin).hexdigest() != entry["cubin_sha256"]:
            raise KernelError(f"{path} is not the cubin that the manifest describes", _REBUILD)
        return cubin


class Kernel:
    """One cubin, ready to launch on any device. Made by `KernelLibrary.kernel`; safe to share between threads."""

    def __init__(self, name: str, entry: Mapping[str, Any], cubin: bytes) -> None:
        self.name = name
        self.arguments: tuple[str, ...] = tuple(argument["name"] for argument in entry["arguments"])
        self._cubin = cubin
        self._symbol: str = entry["symbol"]
        self._threads: int = entry["threads"]
        self._shared: int = entry["shared_bytes"]
        self._types: tuple[str, ...] = tuple(argument["type"] for argument in entry["arguments"])
        self.pointers = frozenset(i for i, type_ in enumerate(self._types) if type_.startswith("*"))
        self._aligned = tuple(i for i, argument in enumerate(entry["arguments"]) if argument["aligned"])
        self._lock = threading.Lock()
        self._ready: set[int] = set()

        self._cuda = cuda = _driver()
        self._success = cuda.CUresult.CUDA_SUCCESS
        self._no_context = cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT
        self._cu_launch = cuda.cuLaunchKernel

        params = [(param["offset"], param["bytes"]) for param in entry["params"]]
        descriptors = [argument for argument in entry["arguments"] if "descriptor" in argument]
        self.descriptors = len(descriptors)  # the first arguments
        self._descriptors: list[_Descriptor] = []
        pieces: list[tuple[int, str]] = []  # (offset, struct code)
        position = 0
        for argument in descriptors:
            meta = argument["descriptor"]
            count = 1 + 2 * len(meta["box"])
            descriptor = _Descriptor(cuda, argument["name"], meta, params[position : position + count])
            self._descriptors.append(descriptor)
            pieces.append((params[position][0], f"{descriptor.size}s"))
            position += count
        self._join = struct.Struct(_packed(pieces))
        codes = [_code(type_) for type_ in self._types[self.descriptors :]] + ["Q", "Q"]
        pieces = [(offset, code) for (offset, _), code in zip(params[position:], codes, strict=True)]
        whole = struct.Struct(_packed([(0, f"{self._join.size}s"), *pieces]))
        self._pack_into = whole.pack_into
        self._block = ctypes.create_string_buffer(whole.size)
        base = ctypes.addressof(self._block)
        self._pointers = (ctypes.c_void_p * len(params))(*(base + offset for offset, _ in params))
        self._pointers_address = ctypes.addressof(self._pointers)
        self._blocks: dict[tuple[TensorView, ...], bytes] = {}
        self._loaded: Any = None
        self._handle: Any = None
        self._current_device = torch._C._cuda_getDevice
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._streams: dict[int, Any] = {}
        self._config: Any = None

    def launch(
        self,
        device: int,
        grid: tuple[int, int, int],
        *arguments: Any,
        overlap: bool = False,
        record: list[Launched] | None = None,
    ) -> None:
        """Launch on torch's current stream of `device`, whichever device is current. Does not wait for the GPU.

        Args:
            device: index of the device that every pointer lives on.
            grid: CTAs along x, y, z; each at least 1.
            arguments: as in `self.arguments`. A descriptor takes (data_ptr, shape, strides), its last stride 1, the
                others multiples of 16 bytes, no size 0; a pointer takes an address, 0 for null; a scalar its value.
            overlap: let the kernel start once every CTA of the one before it on the stream has allowed it. Both must be made
                for it: the kernel before says griddepcontrol.launch_dependents, this one waits before it reads what that wrote.
            record: the launch is appended.

        Raises:
            KernelError: the device is not Hopper, or the driver refuses.
            TypeError, ValueError: an argument does not fit its parameter. Nothing was launched.
        """
        if device not in self._ready:
            self.prepare(device)
        views = arguments[: self.descriptors]
        with self._lock:
            try:
                block = self._blocks.get(views)
                if block is None:
                    block = self._encode(device, views)
                for index in self._aligned:
                    if arguments[index] & 15:
                        raise ValueError(f"{self.arguments[index]} must be a multiple of 16, got {arguments[index]}")
                self._pack_into(self._block, 0, block, *arguments[self.descriptors :], 0, 0)  # scratch is null
            except (struct.error, TypeError, OverflowError, IndexError) as misfit:
                raise self._misfit(arguments, misfit) from misfit
            self._start(device, grid, overlap)
        if record is not None:
            record.append(Launched(self, device, grid, arguments, overlap))

    def block(self, device: int, views: tuple[TensorView, ...]) -> bytes:
        """The descriptors' part of the parameters, for :meth:`repeat`."""
        with self._lock:
            return self._blocks.get(views) or self._encode(device, views)

    def repeat(self, device: int, grid: tuple[int, int, int], block: bytes, arguments: tuple[Any, ...], overlap: bool) -> None:
        """Launch once more, with arguments like those of a launch that was right; see :meth:`launch`.

        Args:
            block: what stands for the descriptors.
            arguments: the others.
        """
        with self._lock:
            self._pack_into(self._block, 0, block, *arguments, 0, 0)
            self._start(device, grid, overlap)

    def _start(self, device: int, grid: tuple[int, int, int], overlap: bool) -> None:
        """Launch with the parameter block as it is. The caller holds the kernel's lock."""
        if self._current_device() != device:
            with torch.cuda.device(device):
                self._start(device, grid, overlap)
            return
        raw = self._raw_stream(device)
        stream = self._streams.get(raw)
        if stream is None:
            if len(self._streams) >= STREAMS_KEPT:
                self._streams.clear()
            stream = self._streams[raw] = self._cuda.CUstream(raw)
        error = self._submit(grid, stream, overlap)
        if error == self._no_context:
            _enter_context(device)
            error = self._submit(grid, stream, overlap)
        if error != self._success:
            _check((error,), f"launching {self.name} with grid {grid} on device {device}")

    def _submit(self, grid: tuple[int, int, int], stream: Any, overlap: bool) -> Any:
        """The driver's answer."""
        if not overlap:
            return self._cu_launch(self._handle, *grid, self._threads, 1, 1, self._shared, stream, self._pointers_address, 0)[0]
        if self._config is None:
            self._config = _overlapping(self._cuda, self._threads, self._shared)
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.hStream = stream
        return self._cuda.cuLaunchKernelEx(config, self._handle, self._pointers_address, 0)[0]

    def prepare(self, device: int) -> None:
        """Bring the cubin to `device`. The first launch does it; call it earlier to choose when. Allowed in capture.

        Raises:
            KernelError: the device is not Hopper, or the driver refuses the cubin.
        """
        with self._lock:
            if device in self._ready:
                return
            _check_device(device)
            cuda = self._cuda
            context = _primary_context(device)
            relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            _check(cuda.cuCtxPushCurrent(context), "cuCtxPushCurrent")
            try:
                # Loading may synchronise, which a capture in progress on this thread would otherwise forbid.
                mode = _check(cuda.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
                try:
                    self._load(device)
                finally:
                    cuda.cuThreadExchangeStreamCaptureMode(mode)
            finally:
                cuda.cuCtxPopCurrent()
            self._ready.add(device)

    def _load(self, device: int) -> None:
        cuda = self._cuda
        if self._handle is None:
            library = _check(cuda.cuLibraryLoadData(self._cubin, [], [], 0, [], [], 0), f"loading {self.name}")
            self._loaded = _check(cuda.cuLibraryGetKernel(library, self._symbol.encode()), f"finding {self._symbol}")
            # Launches take a CUkernel under this type: it runs in whichever context is current.
            self._handle = cuda.CUfunction(int(self._loaded))
        if self._shared > _DEFAULT_DYNAMIC_SHARED:
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(
                cuda.cuKernelSetAttribute(attribute, self._shared, self._loaded, cuda.CUdevice(device)),
                f"asking for {self._shared} bytes of shared memory for {self.name}",
            )
        _check(cuda.cuKernelGetFunction(self._loaded), f"loading {self.name} on device {device}")

    def _encode(self, device: int, views: tuple[TensorView, ...]) -> bytes:
        """The descriptors' part of the parameter block, from maps kept for each tensor; itself kept too."""
        if len(views) < self.descriptors:
            raise TypeError("too few arguments")
        _enter_context(device)
        blocks = [descriptor.block(view) for descriptor, view in zip(self._descriptors, views, strict=True)]
        if len(self._blocks) >= MAPS_KEPT:
            self._blocks.clear()  # cheap to make again, and looking one up must not cost more than a dict
        block = self._blocks[views] = self._join.pack(*blocks)
        return block

    def _misfit(self, arguments: tuple[Any, ...], error: Exception) -> Exception:
        """Which argument does not fit, in words: looked for only after something did not."""
        if len(arguments) != len(self.arguments):
            return TypeError(f"{self.name} must get {len(self.arguments)} arguments, got {len(arguments)};"
                             f" they are {', '.join(self.arguments)}")  # fmt: skip
        for name, type_, value in zip(self.arguments, self._types, arguments, strict=True):
            if type_.startswith("tensordesc"):
                try:
                    hash(value)
                    _, _, _ = value
                except (TypeError, ValueError):
                    return TypeError(f"{name} must be a tuple (data_ptr, shape, strides) of tuples, got {value!r}")
                continue
            try:
                struct.pack("<" + _code(type_), value)
            except (struct.error, TypeError, OverflowError) as problem:
                return TypeError(f"{name} must fit {type_}, got {value!r} ({problem})")
        return TypeError(f"{self.name} must be given what its parameters take, got {arguments!r} ({error})")


class _Descriptor:
    """A tensor descriptor argument: how a view becomes its tensor map and the shape and strides that follow it."""

    def __init__(self, cuda: Any, name: str, meta: Mapping[str, Any], params: Sequence[tuple[int, int]]) -> None:
        self.name = name
        self.rank = rank = len(meta["box"])
        self.element_bytes: int = meta["element_bytes"]
        start = params[0][0]
        codes = ["128s", *["i"] * rank, *["q"] * rank]
        self._struct = struct.Struct(_packed([(o - start, code) for (o, _), code in zip(params, codes, strict=True)]))
        self.size = self._struct.size
        self._cuda = cuda
        self._element = int(getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{meta['element']}"))
        self._swizzle = int(getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{meta['swizzle']}"))
        self._box = (ctypes.c_uint32 * rank)(*reversed(meta["box"]))
        self._steps = (ctypes.c_uint32 * rank)(*[1] * rank)
        self._kept: OrderedDict[TensorView, bytes] = OrderedDict()

    def block(self, view: TensorView) -> bytes:
        """The bytes of this argument in the parameter block. The caller holds the kernel's lock.

        Raises:
            ValueError: TMA cannot address the view.
            KernelError: the driver refuses it all the same.
        """
        kept = self._kept.get(view)
        if kept is None:
            kept = self._kept[view] = self._encode(*view)
            if len(self._kept) > MAPS_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(view)
        return kept

    def _encode(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> bytes:
        unit = self.element_bytes
        if len(shape) != self.rank or len(strides) != self.rank:
            raise ValueError(f"{self.name} must have {self.rank} dimensions, got shape {tuple(shape)}")
        # The stride of a dimension of size 1 is never used, and torch leaves anything in it.
        pitches = [stride * unit if size > 1 else 16 for size, stride in zip(shape[:-1], strides[:-1], strict=True)]
        if min(shape) < 1 or max(shape) >= 2**31:
            raise ValueError(f"{self.name} must have sizes from 1 to 2^31 - 1, got {tuple(shape)}; do not launch on it")
        if address % 16 or strides[-1] != 1 or any(pitch % 16 or not 0 < pitch < 2**40 for pitch in pitches):
            raise ValueError(
                f"{self.name} must start at a multiple of 16 bytes, have last stride 1 and others that are positive"
                f" multiples of 16 bytes, got address {address:#x}, strides {tuple(strides)} of {unit} bytes;"
                " pass a contiguous copy"
            )
        cuda = self._cuda
        # The driver wants the map at a multiple of 64 bytes; the CUtensorMap of cuda.bindings lies anywhere.
        storage = ctypes.create_string_buffer(128 + 64)
        target = -(-ctypes.addressof(storage) // 64) * 64
        error = _encode_tiled()(
            target,
            self._element,
            self.rank,
            address,
            (ctypes.c_uint64 * self.rank)(*reversed(shape)),
            (ctypes.c_uint64 * self.rank)(*reversed(pitches)),
            self._box,
            self._steps,
            int(cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            self._swizzle,
            int(cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
            int(cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )
        action = f"encoding a tensor map for {self.name} at {address:#x}, shape {tuple(shape)}, strides {tuple(strides)}"
        _check((cuda.CUresult(error),), action)
        return self._struct.pack(ctypes.string_at(target, 128), *shape, *strides)


@functools.cache
def library() -> KernelLibrary:
    """The library of the installed package."""
    return KernelLibrary()


def kernel(name: str) -> Kernel:
    """`library().kernel(name)`."""
    return library().kernel(name)


def available(device: int | torch.device | None = None) -> str | None:
    """`library().available(device)`: why the Hopper kernels cannot run there, or None if they can. Never raises."""
    return library().available(device)


def _code(type_: str) -> str:
    return "Q" if type_.startswith("*") else _SCALAR_CODES[type_]


def _packed(pieces: Sequence[tuple[int, str]]) -> str:
    """`struct` format that puts each (offset, code) at its offset, little endian, with explicit padding."""
    form, end = "<", 0
    for offset, code in pieces:
        form += f"{offset - end}x{code}" if offset > end else code
        end = offset + struct.calcsize("<" + code)
    return form


def _overlapping(cuda: Any, threads: int, shared: int) -> Any:
    """A launch configuration, without grid and stream, whose kernel need not wait for the end of the one before it."""
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = cuda.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    config = cuda.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.attrs = [attribute]
    config.numAttrs = 1
    return config


def _no_bindings(why: str) -> KernelError:
    return KernelError(f"cuda.bindings cannot be used: {why}", "install it: pip install cuda-bindings")


def _find_bindings() -> None:
    """Raise if cuda.bindings is not installed, without paying for its import."""
    try:
        found = importlib.util.find_spec("cuda.bindings.driver") is not None
    except ImportError:  # not even the package above it
        found = False
    if not found:
        raise _no_bindings("it is not installed")


def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise _no_bindings(str(error)) from error


_contexts: dict[int, Any] = {}


def _primary_context(device: int) -> Any:
    """The context that torch uses on `device`, retained once a process and never released."""
    context = _contexts.get(device)
    if context is None:
        cuda = _driver()
        _check(cuda.cuInit(0), "cuInit")
        context = _check(cuda.cuDevicePrimaryCtxRetain(cuda.CUdevice(device)), f"opening device {device}")
        _contexts[device] = context
    return context


def _enter_context(device: int) -> None:
    """Make the primary context current on a thread that has none, as one that never used CUDA."""
    cuda = _driver()
    if not int(_check(cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")):
        _check(cuda.cuCtxSetCurrent(_primary_context(device)), "cuCtxSetCurrent")


def _device_index(device: int | torch.device | None) -> int:
    if isinstance(device, int):
        return device
    if device is None or device.index is None:
        if device is not None and device.type != "cuda":
            raise KernelError(f"the Hopper kernels run on CUDA devices, not {device}", "use the reference implementation")
        return torch.cuda.current_device() if torch.cuda.is_available() else 0
    return device.index


@functools.cache
def _encode_tiled() -> Callable[..., int]:
    """The driver's cuTensorMapEncodeTiled, for callers that choose where the map lies."""
    address = _check(_driver().cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0), "finding cuTensorMapEncodeTiled")
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    arguments = (pointer, number, number, pointer, pointer, pointer, pointer, pointer, number, number, number, number)
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address)


def _check_device(device: int) -> None:
    if not torch.cuda.is_available():
        raise KernelError("torch finds no CUDA device", "use the reference implementation, or a CUDA build of torch")
    found = torch.cuda.get_device_capability(device)
    if found != CAPABILITY:
        raise KernelError(
            f"the kernels are built for {ARCH} (H100, H200, H20), device {device} is"
            f" sm_{found[0]}{found[1]} ({torch.cuda.get_device_name(device)})",
            "use the reference implementation there",
        )


def _check(result: tuple[Any, ...], action: str) -> Any:
    """The value of a cuda.bindings result, or KernelError."""
    error, *values = result
    if int(error) != 0:
        raise KernelError(
            f"{action} failed with {getattr(error, 'name', error)}",
            "an earlier asynchronous error also shows here: rerun with CUDA_LAUNCH_BLOCKING=1; if the cubin is refused,"
            " update the NVIDIA driver",
        )
    return values[0] if values else None
