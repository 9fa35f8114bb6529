"""Where a measurement was taken: machine, versions, clocks, power, temperature and throttling."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

# NVML's reasons for clocks below what was asked. A power cap is the normal state of a busy GPU and is recorded only;
# heat and the hardware's own brakes make a block no sample of the steady state.
_STOPPING = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")
_RECORDED = ("SwPowerCap", "SyncBoost", "ApplicationsClocksSetting")


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What a block ran under. ``None`` where nothing answers."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    watts: float | None = None
    celsius: int | None = None
    reasons: tuple[str, ...] = ()
    throttled: bool = False
    load: float | None = None


class Probe:
    """Reads NVML for one GPU, or the load average for a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._nvml: Any = None
        self._handle: Any = None
        if device.type == "cuda":
            with contextlib.suppress(Exception):
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
                self._handle = _handle_of(pynvml, device)

    @property
    def answers(self) -> bool:
        return self._handle is not None

    def begin(self) -> None:
        """Nothing to do yet: NVML's readings are of the moment."""

    def end(self) -> Conditions:
        if self._handle is None:
            load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
            return Conditions(load=load)
        nvml, handle = self._nvml, self._handle

        def ask(function: str, *args: Any) -> Any:
            with contextlib.suppress(Exception):
                return getattr(nvml, function)(handle, *args)
            return None

        mask = ask("nvmlDeviceGetCurrentClocksEventReasons") or ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        reasons = tuple(name for name in (*_STOPPING, *_RECORDED) if mask & _bit(nvml, name))
        power = ask("nvmlDeviceGetPowerUsage")
        return Conditions(
            sm_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            memory_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            watts=None if power is None else power / 1000,
            celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            reasons=reasons,
            throttled=any(name in _STOPPING for name in reasons),
        )


def _bit(nvml: Any, name: str) -> int:
    for pattern in ("nvmlClocksEventReason{}", "nvmlClocksThrottleReason{}"):
        if (found := getattr(nvml, pattern.format(name), None)) is not None:
            return int(found)
    return 0


def _handle_of(nvml: Any, device: torch.device) -> Any:
    """NVML numbers the board's GPUs, torch numbers the visible ones: the UUID is what both know."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    for candidate in (f"GPU-{uuid}", uuid):
        with contextlib.suppress(Exception):
            return nvml.nvmlDeviceGetHandleByUUID(candidate)
    return nvml.nvmlDeviceGetHandleByIndex(index)


def describe(device: torch.device) -> dict[str, str]:
    """Hardware and versions, as a reader of the figures needs them."""
    found = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        with contextlib.suppress(Exception):
            import triton

            found["triton"] = str(triton.__version__)
    else:
        found["device"] = processor()
        found["cores"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    if hasattr(os, "getloadavg"):
        found["load average"] = f"{os.getloadavg()[0]:.2f}"
    return found


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def last_level_cache_bytes(device: torch.device) -> int:
    """The cache that isolated timing has to get past."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 50 << 20))
    sizes = [1 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]] if text[-1] in "KMG" else int(text))
    return max(sizes)


@contextlib.contextmanager
def pinned(device: torch.device) -> Iterator[None]:
    """Keeps the threads of a CPU measurement on one core each; a GPU's host thread is left alone.

    Threads are told apart by what they do: those that work during a parallel operation are pinned, compile workers and
    watchers are not.
    """
    if device.type == "cuda" or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    before: dict[int, set[int]] = {}
    try:
        for index, thread in enumerate(_working_threads()[: len(cores)]):
            with contextlib.suppress(OSError):
                before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, {cores[index]})
        yield
    finally:
        for thread, mask in before.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, mask)


def _working_threads() -> list[int]:
    """This thread and those that took processor time in a parallel operation, by thread id."""

    def spent() -> dict[int, int]:
        found = {}
        for path in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[int(path.parent.name)] = int(path.read_text().split()[0])
        return found

    work = torch.ones(1 << 20)
    work.mul_(1.0)
    start = spent()
    for _ in range(20):
        work.mul_(1.0)
    own = threading.get_native_id()
    active = [t for t, ns in spent().items() if t != own and ns - start.get(t, ns) > 100_000]
    return [own, *sorted(active)]
