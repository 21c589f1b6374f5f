"""What memory the CPU device counts with: the machine's, or what its control groups leave of it,
read from folders that are made here."""

import ctypes
import os
from pathlib import Path

import pytest
from support.op_devices import core_library
from tinsmith import _core

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
V1_NONE = 0x7FFFFFFFFFFFF000  # what version 1 says where there is no limit


def memory(root: Path) -> tuple[int, int]:
    """(free, all) MiB below a root folder."""
    library = ctypes.CDLL(str(core_library()))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.host_memory(str(root).encode(), ctypes.byref(free), ctypes.byref(total))
    return free.value // MIB, total.value // MIB


def write(root: Path, folder: str, **files: object) -> None:
    """A group's files, named without "memory."."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / folder / f"memory.{name}").write_text(f"{content}\n")


def groups(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def stat(**pages: int) -> str:
    """A memory.stat with these lines, in MiB, among others."""
    return "\n".join(["anon 77777", *(f"{key} {size * MIB}" for key, size in pages.items())])


def test_without_groups_all_of_the_machine_is_free(tmp_path: Path) -> None:
    assert memory(tmp_path) == (MACHINE // MIB, MACHINE // MIB)
    groups(tmp_path, "0::/")
    write(tmp_path, V2, max="max", high="max", current=200 * MIB)
    assert memory(tmp_path) == (MACHINE // MIB, MACHINE // MIB)


def test_a_container_of_version_2(tmp_path: Path) -> None:
    """File pages are given up for others."""
    groups(tmp_path, "0::/")
    pages = stat(inactive_file=20, active_file=10, inactive_anon=5, file=99)
    write(tmp_path, V2, max=100 * MIB, high="max", current=70 * MIB, stat=pages)
    assert memory(tmp_path) == (60, 100)
    write(tmp_path, V2, high=90 * MIB)
    assert memory(tmp_path) == (50, 90)
    write(tmp_path, V2, current=300 * MIB)
    assert memory(tmp_path) == (0, 90)


def test_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    groups(tmp_path, "1:name=systemd:/", "0::/user.slice/a b.scope/own")
    write(tmp_path, V2 + "/user.slice/a b.scope/own", max="max", current=1 * MIB, stat=stat())
    write(tmp_path, V2 + "/user.slice/a b.scope", max=80 * MIB, current=10 * MIB, stat=stat())
    write(tmp_path, V2 + "/user.slice", max=90 * MIB, current=60 * MIB, stat=stat())
    write(tmp_path, V2 + "/other.slice", max=1 * MIB)
    assert memory(tmp_path) == (30, 80)


@pytest.mark.parametrize("path", ("/docker/1234", "/"))
def test_a_container_of_version_1(tmp_path: Path, path: str) -> None:
    """Its groups begin where its own does, whatever it is called outside."""
    groups(tmp_path, "12:cpu,cpuacct:/docker/9", f"4:hugetlb,memory:{path}", "0::/docker/7")
    files = stat(inactive_file=1, total_inactive_file=15, total_active_file=5)
    write(tmp_path, V1, limit_in_bytes=64 * MIB, usage_in_bytes=50 * MIB, stat=files)
    assert memory(tmp_path) == (34, 64)
    write(tmp_path, V1, limit_in_bytes=V1_NONE)
    assert memory(tmp_path) == (MACHINE // MIB, MACHINE // MIB)


def test_the_cpu_device_counts_with_it() -> None:
    free, total = _core.memory("cpu")
    assert 0 < free <= total <= MACHINE
    assert total // MIB == memory(Path("/"))[1]
    with pytest.raises(RuntimeError, match="there is no device 'none'"):
        _core.memory("none")
