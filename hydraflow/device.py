"""Devices, dtypes and cores that this process can use.

The only module that names "cuda". torch is imported inside the functions, because configuration and planning
need the number of cores but not torch.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GPU = "cuda"
DEVICES = ("auto", "cpu", GPU)
"""Legal values of trainer.device."""
CPU_PROCESSES = 2
"""Default number of worker processes on a machine without GPUs."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's `mallopt`: free bytes at the end of the heap, and size of a block, above which memory is
returned to the system."""
_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def usable_cores() -> int:
    """Cores that this process may use, at least 1: the smallest of `core_limits`."""
    return max(1, int(min(core_limits().values())))


def core_limits(
    *,
    cgroups: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
    environ: Mapping[str, str] = os.environ,
) -> dict[str, float]:
    """Source of a limit -> number of cores: affinity mask, cgroup quota (v1 and v2), Slurm's allocation.

    cgroups: where the control groups are mounted. membership: the file that says which ones this process is
    in.
    """
    limits = {"affinity mask": float(len(os.sched_getaffinity(0)))}
    slurm = environ.get("SLURM_CPUS_PER_TASK", "")
    if slurm.isdecimal() and int(slurm) > 0:
        limits["SLURM_CPUS_PER_TASK"] = float(slurm)
    quotas = map(_quota, cgroup_folders("cpu", cgroups, membership))
    if allowed := [quota for quota in quotas if quota is not None]:
        limits["cgroup quota"] = min(allowed)
    return limits


def cgroup_folders(
    controller: str, cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[Path]:
    """The control group folders (v1 and v2) whose limits apply to this process, from its own group up to the
    root."""
    folders = [cgroups, cgroups / controller]
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and controller not in controllers.split(","):
            continue
        for root in [cgroups / (controllers or "unified"), cgroups / controller if controllers else cgroups]:
            own = root / path.strip("/")
            folders += [folder for folder in (own, *own.parents) if folder == root or root in folder.parents]
    return list(dict.fromkeys(folders))


def _quota(folder: Path) -> float | None:
    """CPU quota of a control group, in cores; None: no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if quota.strip() != "max" and int(quota) > 0 else None
    except (OSError, ValueError):
        return None


def gpu_count() -> int:
    """Number of CUDA devices that this process sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_memory(index: int) -> tuple[int, int]:
    """(free, total) bytes of a CUDA device that this process sees."""
    import torch

    return torch.cuda.mem_get_info(index)


def gpu_name(index: int) -> str:
    """Name of a CUDA device, as its driver reports it."""
    import torch

    return torch.cuda.get_device_name(index)


def listed_gpus(
    driver: Path = Path("/proc/driver/nvidia/gpus"), environ: Mapping[str, str] = os.environ
) -> int:
    """Number of GPUs that the driver lists and the environment leaves visible; for the planner, which runs
    without torch."""
    listed = len(list(driver.iterdir())) if driver.is_dir() else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return listed

    def is_there(name: str) -> bool:
        return int(name) < listed if name.isdecimal() else name.startswith(("GPU-", "MIG-"))

    # CUDA ignores everything from the first that is no GPU on
    return min(listed, sum(1 for _ in takewhile(is_there, map(str.strip, visible.split(",")))))


def planned_devices(device: str) -> int:
    """Number of devices on this machine for a `trainer.device`, as far as known without torch: GPUs, or
    processes on a CPU."""
    return (0 if device == "cpu" else listed_gpus()) or CPU_PROCESSES


def planned_type(device: str, described: str | None = None) -> str:
    """cpu or gpu, as far as known without torch. device: `trainer.device`. described: `cluster.device`, which
    takes precedence.

    >>> planned_type("auto", "h100"), planned_type("cpu")
    ('gpu', 'cpu')
    """
    named = described or device
    if named == "auto":
        return "gpu" if listed_gpus() else "cpu"
    return "cpu" if named == "cpu" else "gpu"


def gpu_runtime() -> str | None:
    """The CUDA version that torch was built for; None: it was built without CUDA."""
    import torch

    return torch.version.cuda


def resolve_device(name: str) -> str:
    """The device type (cpu or cuda) of a configured name; auto takes CUDA where there is one."""
    if name != "auto":
        return name
    return "cuda" if gpu_count() else "cpu"


def current_device(device_type: str, local_rank: int) -> torch.device:
    """The device of a worker process; on a GPU also makes it CUDA's current device."""
    import torch

    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


LentTensor = tuple[Any, ...]
"""Arguments with which torch opens a GPU tensor in another process; the GPU's index, which may differ there,
is replaced by its `device_identity`."""


def device_identity(device: torch.device) -> str:
    """UUID of a GPU, the same in all processes, unlike its index; empty for a CPU."""
    import torch

    return "" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def number_of(identity: str) -> int | None:
    """This process's index of the GPU with that `device_identity`; None: it is not visible."""
    import torch

    found = (device_identity(torch.device("cuda", index)) for index in range(gpu_count()))
    return next((index for index, seen in enumerate(found) if identity and seen == identity), None)


def lend(tensor: torch.Tensor) -> LentTensor:
    """A handle with which other processes that see the GPU `borrow` a tensor (CUDA IPC). Its memory stays
    allocated while one of them holds it."""
    from torch.multiprocessing.reductions import reduce_tensor

    facts = list(reduce_tensor(tensor)[1])
    facts[_place_of_device()] = device_identity(tensor.device)
    return tuple(facts)


def borrow(lent: LentTensor) -> torch.Tensor:
    """The tensor that another process lent, without a copy."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    facts, place = list(lent), _place_of_device()
    facts[place] = number_of(facts[place])
    return rebuild_cuda_tensor(*facts)


def _place_of_device() -> int:
    """Position of the GPU's index among the arguments of a lent tensor."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return [*inspect.signature(rebuild_cuda_tensor).parameters].index("storage_device")


def finish_work(device_type: str) -> None:
    """Waits for a GPU's queued work, before another process reads or overwrites its memory; no-op on a
    CPU."""
    if device_type != "cpu":
        import torch

        torch.cuda.synchronize()


@contextmanager
def in_fixed_order() -> Iterator[None]:
    """torch's kernels sum in a fixed order in the body. This affects the whole process, and operations
    without a deterministic kernel raise RuntimeError, so the body should be a single call."""
    import torch

    deterministic: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory
    # torch.use_deterministic_algorithms would also import torch._inductor and change its settings
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    deterministic.fill_uninitialized_memory = False  # filling new tensors costs time and orders no sum
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warns)
        deterministic.fill_uninitialized_memory = fills


_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Messages of RuntimeErrors that also mean out of memory."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch means that the device or the host has no memory left."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in str(error) for text in _OUT_OF_MEMORY
    )


def collective_backend(device_type: str) -> str:
    """Backend of torch.distributed; the one for GPUs reduces host tensors as well."""
    return "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"


def broadcast_backend(device_type: str) -> str:
    """Backend of torch.distributed that broadcasts tensors of this device type."""
    return "gloo" if device_type == "cpu" else "nccl"


@contextmanager
def errors_reach_the_caller() -> Iterator[None]:
    """NCCL groups created inside the block raise errors in `wait`; by default NCCL ends the process when a
    peer dies or times out."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def resolve_dtype(name: str, device_type: str) -> torch.dtype:
    """The torch type of a configured name; auto is bfloat16 where the device computes in it, else float32."""
    import torch

    if name != "auto":
        return getattr(torch, _DTYPES[name])
    has_bf16 = torch.cuda.is_bf16_supported() if device_type == "cuda" else cpu_has_bf16()
    return torch.bfloat16 if has_bf16 else torch.float32


@cache
def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; without that, bfloat16 is slow."""
    described = _cpu_as_described()
    return "avx512_bf16" in described or "amx_bf16" in described


@cache
def mkl_is_slow() -> bool:
    """Whether MKL, with which torch multiplies float32 matrices, leaves this CPU's AVX-512 unused, as on
    processors other than Intel's."""
    described = _cpu_as_described()
    return "avx512f" in described and "GenuineIntel" not in described


@cache
def mkl_has_avx512() -> bool:
    """Whether MKL multiplies with AVX-512 on this CPU."""
    described = _cpu_as_described()
    return "avx512f" in described and "GenuineIntel" in described


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster on this CPU than torch's default, MKL."""
    import torch

    return mkl_is_slow() and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def _cpu_as_described() -> str:
    """The system's description of the CPU; empty if there is none."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def onednn_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` by oneDNN, without a gradient: (..., K), (N, K) and (N,) to (..., N). `weight` is
    what `onednn_reordered` made of one, or it or its transpose must be contiguous: a slice of a matrix takes
    hundreds of times as long."""
    import torch

    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def onednn_reordered(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of a weight (N, K) in the order in which oneDNN multiplies about so many rows by it. It can be
    used for nothing else."""
    import torch

    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


_TERAFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
"""Peak TFLOP/s of dense 16-bit matrix products, from NVIDIA's data sheets, by a part of the device's name;
the first match counts."""
_SIDE, _SIDE_OF_ONE_THREAD = 1024, 512
"""Size of the matrices that are multiplied to measure a CPU: several threads need larger ones."""


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of matrix products: for a GPU the 16-bit figure of its data sheet, for a CPU measured once
    by this process with its threads. None: not known."""
    import torch

    if device.type == "cpu":
        return measured_flops(dtype)
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    name = gpu_name(torch.cuda.current_device() if device.index is None else device.index)
    return next((1e12 * peak for part, peak in _TERAFLOPS.items() if part in name), None)


def measured_flops(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of a few products on the CPU, by the library that linear layers use. On a busy
    machine, two measurements may differ by 10%."""
    import torch

    side = _SIDE_OF_ONE_THREAD if torch.get_num_threads() == 1 else _SIDE
    matrix = torch.ones(side, side, dtype=dtype)
    multiply = onednn_product if dtype == torch.float32 and onednn_is_faster() else torch.mm
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        multiply(matrix, matrix)
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds)


def keep_freed_memory(device_type: str, environ: Mapping[str, str] = os.environ) -> None:
    """On a CPU: freed blocks stay with this process until `return_memory`; by default glibc returns every
    large one, and the system clears its pages before the next use. MALLOC_* in the environment take
    precedence."""
    if device_type == "cpu" and not any(name.startswith("MALLOC_") for name in environ):
        with suppress(AttributeError):  # a C library other than glibc
            mallopt = ctypes.CDLL(None).mallopt
            # glibc before 2.35 accepts at most 32 MiB; both are set, as setting one ends glibc's own tuning
            if mallopt(_MMAP_THRESHOLD, 2**31 - 1) or mallopt(_MMAP_THRESHOLD, 2**25):
                mallopt(_TRIM_THRESHOLD, -1)  # never; a number would be at most 2 GiB


def return_memory(device_type: str) -> None:
    """Returns unused memory that allocators have cached to the device or the host."""
    if device_type == "cpu":
        with suppress(AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)
        return
    import torch

    torch.cuda.ipc_collect()  # memory that was lent and that the borrowers have released
    torch.cuda.empty_cache()


def keep_allocations(device_type: str, most: int) -> None:
    """Starts recording a GPU's allocations with their stacks, for `write_allocations`; no-op on a CPU."""
    if device_type != "cpu":
        import torch

        torch.cuda.memory._record_memory_history(max_entries=most)


def write_allocations(device_type: str, path: str) -> None:
    """Writes the recorded allocations for pytorch.org/memory_viz, and stops recording; no-op on a CPU."""
    if device_type != "cpu":
        import torch

        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)


def begin_range(device_type: str) -> None:
    """Starts the range that an external profiler (Nsight Systems) collects; on a CPU it collects
    everything."""
    if device_type != "cpu":
        import torch

        torch.cuda.profiler.start()


def end_range(device_type: str) -> None:
    """Ends the range of `begin_range`."""
    if device_type != "cpu":
        import torch

        torch.cuda.profiler.stop()
