"""One NVIDIA GPU through the driver's own API (libcuda), which every machine with a GPU has.

Device memory, one stream, copies: no more than a session needs, so that the runtime wants neither
the CUDA toolkit nor a package for it. A stream of the driver is one of the CUDA runtime as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ExitCode, SpikeError

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2
Pointer, Size = ctypes.c_uint64, ctypes.c_size_t
Host, Handle = ctypes.c_void_p, ctypes.c_void_p
Int, UInt = ctypes.c_int, ctypes.c_uint

CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (UInt,),
    "cuDeviceGetCount": (ctypes.POINTER(Int),),
    "cuDeviceGet": (ctypes.POINTER(Int), Int),
    "cuDeviceGetName": (ctypes.c_char_p, Int, Int),
    "cuDeviceGetAttribute": (ctypes.POINTER(Int), Int, Int),
    "cuDriverGetVersion": (ctypes.POINTER(Int),),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(Handle), Int),
    "cuDevicePrimaryCtxRelease_v2": (Int,),
    "cuCtxSetCurrent": (Handle,),
    "cuStreamCreate": (ctypes.POINTER(Handle), UInt),
    "cuStreamDestroy_v2": (Handle,),
    "cuStreamSynchronize": (Handle,),
    "cuMemAlloc_v2": (ctypes.POINTER(Pointer), Size),
    "cuMemFree_v2": (Pointer,),
    "cuMemAllocHost_v2": (ctypes.POINTER(Host), Size),
    "cuMemFreeHost": (Host,),
    "cuMemsetD8Async": (Pointer, ctypes.c_ubyte, Size, Handle),
    "cuMemcpyHtoDAsync_v2": (Pointer, Host, Size, Handle),
    "cuMemcpyDtoHAsync_v2": (Host, Pointer, Size, Handle),
    "cuMemGetInfo_v2": (ctypes.POINTER(Size), ctypes.POINTER(Size)),
    "cuGetErrorName": (Int, ctypes.POINTER(ctypes.c_char_p)),
}
"""The functions of the driver that are called, with their arguments; each returns a CUresult."""
COMPUTE_CAPABILITY = (75, 76)
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: the stream does not wait for the default one."""


class OutOfDeviceMemory(Exception):
    """The GPU has less memory free than was asked for."""


class Gpu:
    """The first GPU, with one stream. Addresses are plain numbers.

    A context belongs to the calling thread: `enter` before using it from another one.

    Args:
        driver: for tests; None loads `LIBRARY`.

    Raises:
        SpikeError: SPK621, there is no driver or no GPU, or it refuses.
    """

    def __init__(self, driver: Any = None) -> None:
        self._driver = _declared(driver or _load())
        self._kept: list[Callable[[], None]] = []
        count, self._device = Int(0), Int(0)
        if self._driver.cuInit(0) or self._driver.cuDeviceGetCount(ctypes.byref(count)):
            raise no_gpu("the NVIDIA driver does not start")
        if count.value < 1:
            raise no_gpu("the NVIDIA driver finds no GPU")
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._context, stream = Handle(), Handle()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._kept.append(lambda: self._call("cuDevicePrimaryCtxRelease_v2", self._device))
        self.enter()
        self._call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        self.stream = int(stream.value or 0)
        self._kept.append(lambda: self._call("cuStreamDestroy_v2", self.stream))

    @property
    def name(self) -> str:
        """Such as ``NVIDIA L4 (sm89)``."""
        text, parts = ctypes.create_string_buffer(256), []
        self._call("cuDeviceGetName", text, 256, self._device)
        for attribute in COMPUTE_CAPABILITY:
            value = Int(0)
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
            parts.append(str(value.value))
        return f"{text.value.decode()} (sm{''.join(parts)})"

    @property
    def driver_version(self) -> str:
        """The CUDA version that the driver offers, such as ``13.0``."""
        version = Int(0)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def free_memory(self) -> int:
        """Bytes of device memory that nobody uses."""
        free, total = Size(0), Size(0)
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return int(free.value)

    def enter(self) -> None:
        """Make the GPU the calling thread's own."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, size: int) -> int:
        """Address of `size` zeroed bytes on the GPU, until `close`; OutOfDeviceMemory."""
        address = Pointer(0)
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        self._kept.append(lambda: self._call("cuMemFree_v2", address))
        self._call("cuMemsetD8Async", address, 0, size, self.stream)
        return int(address.value)

    def host_array(self, size: int) -> NDArray[np.uint8]:
        """Bytes of this machine that the GPU copies from and to directly, uint8 ``[size]``."""
        address = Host()
        self._call("cuMemAllocHost_v2", ctypes.byref(address), size)
        self._kept.append(lambda: self._call("cuMemFreeHost", address))
        assert address.value is not None
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address.value))

    def copy_in(self, address: int, content: NDArray[Any]) -> None:
        """Queue a copy of a contiguous `host_array` (or part of it) to the GPU."""
        self._call(
            "cuMemcpyHtoDAsync_v2", address, content.ctypes.data, content.nbytes, self.stream
        )

    def copy_out(self, content: NDArray[Any], address: int) -> None:
        """Queue a copy from the GPU to a contiguous `host_array` (or part of it)."""
        self._call(
            "cuMemcpyDtoHAsync_v2", content.ctypes.data, address, content.nbytes, self.stream
        )

    def wait(self) -> None:
        """Return when everything that was queued is done."""
        self._call("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        """Give everything back; the newest first."""
        self.enter()
        self.wait()
        while self._kept:
            self._kept.pop()()

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result == OUT_OF_MEMORY:
            raise OutOfDeviceMemory
        if result:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(result, ctypes.byref(text))
            cause = text.value.decode() if text.value else f"error {result}"
            raise no_gpu(f"{name} failed with {cause}")


def no_gpu(cause: str) -> SpikeError:
    """The error of a TensorRT engine on a machine that can't run it: SPK621."""
    return SpikeError(
        "SPK621",
        "engine",
        f"a TensorRT engine runs on an NVIDIA GPU, and {cause}.",
        "Run it on a machine with a GPU of the engine's list (`spike inspect`), or build the "
        "checkpoint with --backend onnxruntime for this one.",
        ExitCode.UNSUPPORTED,
    )


def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise no_gpu(f"this machine has no NVIDIA driver ({LIBRARY})") from None


def _declared(driver: Any) -> Any:
    """The library with its functions' argument types set."""
    for name, types in CALLS.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = types, Int
    return driver
