"""What Linux tells and takes about host memory: how much is left, huge pages, NUMA nodes.

Advice that the kernel does not take is no error: memory then is as it would have been.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import resource
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20
MPOL_PREFERRED = 1
# System call numbers: libnuma, which wraps it, is often not installed.
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_NO_LIMIT = 1 << 60


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping or being killed: the machine's and the cgroup's.

    Args:
        root: where /proc and /sys hang (for tests).
    """
    left = _meminfo(root / "proc/meminfo", "MemAvailable")
    return min([left if left is not None else _NO_LIMIT, *_cgroup_headrooms(root)])


def memlock_bytes() -> int | None:
    """RLIMIT_MEMLOCK of this process, None if unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def map_anonymous(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Private memory with room for ``num_bytes`` from an offset that starts a huge page.

    Returns:
        the mapping and the offset. Nothing is touched yet.

    Raises:
        OSError: the kernel refuses the mapping.
    """
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory, -address % HUGE_PAGE_BYTES


def advise_huge_pages(memory: mmap.mmap) -> bool:
    """Ask for huge pages before memory is touched. Returns whether the kernel took it."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return False
    try:
        memory.madvise(advice)
    except OSError:
        return False
    return True


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Place pages of a range on NUMA ``node`` when touched; on others once it is full.

    Args:
        address: a multiple of the page size.

    Returns:
        whether the kernel took it.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = (ctypes.c_ulong * (node // bits + 1))()
    words[node // bits] = 1 << (node % bits)
    call = ctypes.CDLL(None, use_errno=True).syscall
    # The kernel reads one bit less than maxnode says.
    maxnode = len(words) * bits + 1
    arguments = (address, num_bytes, MPOL_PREFERRED, ctypes.addressof(words), maxnode, 0)
    return bool(call(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) == 0)


def gpu_node(pci_address: str, sys: Path = Path("/sys")) -> int | None:
    """NUMA node of a PCI device such as ``0000:18:00.0``; None where there is but one, or unknown.

    NVML's topology calls read the same file, but number GPUs without CUDA_VISIBLE_DEVICES.
    """
    nodes = list((sys / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return None
    try:
        node = int((sys / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _meminfo(path: Path, field: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_headrooms(root: Path) -> list[int]:
    """What is left to every memory cgroup this process is in (version 1 or 2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount, files = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's; its own group is then the mount itself.
        folder = root / mount / path.lstrip("/")
        while True:
            left = _headroom(folder, *files)
            if left is not None:
                found.append(left)
            if folder == root / mount or root / mount not in folder.parents:
                break
            folder = folder.parent
    return found


def _headroom(folder: Path, limit_file: str, used_file: str, cache_field: str) -> int | None:
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        stat = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= _NO_LIMIT:
        return None
    reclaimable = int(stat[stat.index(cache_field) + 1]) if cache_field in stat else 0
    return max(0, int(limit) - used + reclaimable)
