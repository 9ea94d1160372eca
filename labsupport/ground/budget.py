"""Sizes and budgets: turn "256 MiB" into the limits that a child process gets, or say why it cannot be."""

import contextlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 2**20
_UNITS = {"B": 1, "KIB": 2**10, "MIB": MIB, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
SMALLEST = 16 * MIB
SMALLEST_OUTSIDE = 64 * MIB
# What the process of an arm takes before its first tensor: Python, TensorFlow and its threads (375 MiB measured, on 2 cores).
ITSELF = 512 * MIB
# The folder of the machine's line (line.py), in the environment of a kernel. An arm is past it: one that starts another would
# wait for itself.
LINE = "LABSUPPORT_LINE"
# The allocator's first region, for the first small tensor. What is left of the budget can be reserved as one.
_FIRST_REGION_MIB = 2
# What is reserved at once where nobody gave a budget. The allocator's table takes 8 bytes for each 256 of a region, written
# at the start: 320 MiB and 0.2 s for the 10 GiB that are half of a machine's free memory; 64 MiB for this.
_REGION_UNASKED = 2048 * MIB

# For run(..., env=NO_ONEDNN): where memory runs out inside a fused oneDNN kernel, TensorFlow 2.21 crashes (SIGSEGV)
# in place of raising. Without oneDNN's kernels the same step raises a ResourceExhaustedError, as on a GPU.
NO_ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "0"}
# "true": regions grow as they are needed, in place of one region (core/common_runtime/gpu/gpu_bfc_allocator.cc). TensorFlow
# reads it for GPUs, whatever set_memory_growth() said; for the CPU's allocator, which always grows, apply() does.
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


class BudgetError(ValueError):
    """A budget that is no size, or that this machine cannot give."""


def parse_size(size):
    """Bytes of a size such as "256 MiB", "1.5 GiB" or "200 MB"; a bare number is not accepted.

    Raises BudgetError with what to write instead.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([kmg]i?b|b)\s*", str(size), re.IGNORECASE)
    if not match:
        raise BudgetError(f'{size!r} is not a size: write a positive number and a unit, such as "256 MiB" or "2 GiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def mib(size):
    """Text for a number of bytes; None reads "unavailable", since 0 would claim that it was measured. Little is in KiB or bytes."""
    if size is None:
        return "unavailable"
    for least, unit in ((2**10 / 20, "B"), (MIB / 20, "KiB")):  # in the next unit it would read 0.0
        if 0 < abs(size) < least:
            return f"{size / _UNITS[unit.upper()]:.{0 if unit == 'B' else 1}f} {unit}"
    return f"{size / MIB:,.1f} MiB"


def in_mib(size):
    """A number of bytes in MiB; None, which is "unavailable", stays None."""
    return None if size is None else size / MIB


def process_status(name, pid="self"):
    """Bytes of a field of /proc/self/status such as "VmHWM"; None where there is no /proc, or no such process."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _data_limit():
    """Bytes of private writable memory that this process may have (RLIMIT_DATA); None if unlimited."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def machine_memory():
    """Bytes of memory that this process may use at most: the machine's, or less where a container, a hub or a limit of its own says so.

    JupyterHub and Binder give each learner's limit in MEM_LIMIT, in bytes (jupyterhub/spawner.py: get_env).
    """
    limits = [os.environ.get("MEM_LIMIT", "")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError):  # no such control group
            limits.append(Path(file).read_text().strip())
    total = psutil.virtual_memory().total
    return min(
        total, _data_limit() or total, *(int(limit) for limit in limits if limit.isdecimal())
    )  # or "max", or empty


@dataclass(frozen=True)
class Budget:
    """What one arm may use, in bytes.

    tensors: what TensorFlow's allocator may hand out (a hard limit: beyond it a ResourceExhaustedError).
    outside: what the process may add beside that (NumPy, Python, graphs, threads; beyond it a MemoryError).
    region: how much of `tensors` is reserved at once.
    """

    tensors: int
    outside: int
    region: int

    @classmethod
    def of(cls, tensors, outside):
        """The budget for two sizes as text. tensors=None gives half of the memory that is free now."""
        machine = machine_memory()
        free = min(psutil.virtual_memory().available, machine)
        wanted = int(free / 2) // MIB * MIB if tensors is None else parse_size(tensors)
        if wanted < SMALLEST:
            raise BudgetError(
                f"a budget of {tensors or mib(wanted)} is too small to start in: give at least {mib(SMALLEST)}"
            )
        room = machine - ITSELF
        if wanted > room:
            instead = (
                f'give less, for instance "{int(room / 2 / MIB)} MiB"' if room / 2 >= SMALLEST else "find one with more"
            )
            raise BudgetError(
                f"a budget of {mib(wanted)} is more than this machine has for you: {mib(machine)}, "
                f"{mib(ITSELF)} of which Python and TensorFlow take; {instead}"
            )
        beside = parse_size(outside)
        if beside < SMALLEST_OUTSIDE:
            raise BudgetError(
                f"outside={outside!r} leaves no room for Python and TensorFlow's threads: give at least {mib(SMALLEST_OUTSIDE)}"
            )
        if beside > machine:
            raise BudgetError(f"outside={outside!r} is more than this machine has for you: {mib(machine)}; give less")
        return cls(wanted, beside, min(wanted, _REGION_UNASKED) if tensors is None else wanted)

    def environment(self):
        """Environment variables that must be set before TensorFlow is imported.

        The best-fit-with-coalescing allocator is the one GPUs use; on a CPU it must be asked for, and only
        there does it count every tensor and obey a limit (TensorFlow source: core/common_runtime/process_state.cc).
        """
        return {
            "TF_CPU_ALLOCATOR_USE_BFC": "1",
            "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(self.tensors // MIB),
            _GROWTH: "false",
            "TF_CPP_MIN_LOG_LEVEL": "0",  # the allocator's dump after an OOM is logged as information
        }

    def apply(self, tf, logical_devices):
        """In the child, before the first tensor: impose the limits. Returns the device's name, e.g. "CPU:0"."""
        device = self.configure(tf, logical_devices)
        if os.environ.get(_GROWTH) != "true":
            self.reserve(tf, device)
        self.limit_process()
        return device

    def configure(self, tf, logical_devices):
        """Before TensorFlow's devices are made: how many, and a GPU's limit. Returns the name of the first."""
        gpus = tf.config.list_physical_devices("GPU")
        limit_mib = self.tensors // MIB
        if gpus:
            split = [tf.config.LogicalDeviceConfiguration(limit_mib // logical_devices) for _ in range(logical_devices)]
            tf.config.set_logical_device_configuration(gpus[0], split)
            tf.config.set_visible_devices(gpus[0], "GPU")
        elif logical_devices > 1:
            split = [tf.config.LogicalDeviceConfiguration() for _ in range(logical_devices)]
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], split)
        return "GPU:0" if gpus else "CPU:0"

    def reserve(self, tf, device):
        """Before the first tensor: reserve the region, which is the whole of a budget that was given, as a GPU does by default.

        Otherwise regions grow by doubling and a 94 MiB array is counted as 128. The pages stay untouched: this costs
        no more memory than the allocator's table of them.
        """
        if device.startswith("CPU"):
            with tf.device(device):
                tf.raw_ops.Empty(shape=[self.region // MIB - _FIRST_REGION_MIB, MIB // 8], dtype=tf.float64)

    def limit_process(self, free=None):
        """Cap private writable memory (Linux). Elsewhere the parent's watch on the resident set is the only cap.

        free: bytes of it that are not counted; what there is now if None.
        """
        private = process_status("VmData")
        if private is None:
            return
        import resource

        # root could lift a lower limit that is in force already; the hard one stays, for lift_process_limit()
        limit = min((private if free is None else free) + self.outside, _data_limit() or sys.maxsize)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def lift_process_limit():
    """Take back the cap on private memory when the arm's function has ended, so that what happened can be told and sent."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def child_environment(budget, extra):
    """The whole environment of an arm's process."""
    inherited = {name: value for name, value in os.environ.items() if name != LINE}
    return {**inherited, **budget.environment(), **(extra or {})}
