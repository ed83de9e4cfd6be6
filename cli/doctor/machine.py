"""Memory, CPU, disk and limits."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from pathlib import Path

import psutil

from towerd.cli.doctor.check import Check, Finding, fail, ok, warn
from towerd.cli.output import size
from towerd.settings.config import Config

GIB = 2**30
RAM_FREE_MIN = 1 * GIB
DISK_FREE_MIN = 256 * 2**20
DISK_FREE_LOW = 5 * GIB
FILES_MIN = 1024
X86_FLAGS = ("avx2", "fma", "f16c")
CPUINFO = Path("/proc/cpuinfo")
SHM = Path("/dev/shm")


def memory(config: Config) -> Finding:
    """Total and free RAM, and what towerd may have of it."""
    ram = psutil.virtual_memory()
    found = f"{size(ram.total)}, {size(ram.available)} free"
    if config.ram_max:
        found += f", at most {size(config.ram_max)} for towerd (--ram-max)"
    if config.ram_max > ram.total:
        return warn(found, "--ram-max is more than the machine has: lower it, or leave it out.")
    if ram.available < RAM_FREE_MIN:
        return warn(found, "Close other programs, or set a smaller --live-tokens and --hot-bytes.")
    return ok(found)


def cpu(config: Config) -> Finding:
    """Cores, and the instructions that make llama.cpp fast."""
    cores = f"{config.threads} threads, {platform.machine()}"
    if platform.machine().lower() not in ("x86_64", "amd64") or not CPUINFO.exists():
        return ok(cores)
    flags: set[str] = set()
    for line in CPUINFO.read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    missing = [flag for flag in X86_FLAGS if flag not in flags]
    if missing:
        return warn(
            f"{cores}, without {', '.join(missing)}",
            "Generation is several times slower on this CPU; prefer small models.",
        )
    extra = [flag for flag in ("avx512f", "avx512_vnni", "amx_int8") if flag in flags]
    return ok(f"{cores}, {', '.join((*X86_FLAGS, *extra))}")


def disk(config: Config) -> Finding:
    """Free space where the store is, or will be."""
    folder = existing(config.store_dir)
    free = shutil.disk_usage(folder).free
    found = f"{size(free)} free at {folder}"
    if free < DISK_FREE_MIN:
        return fail(found, "Free disk space, or choose another disk with --store-dir.")
    if free < DISK_FREE_LOW:
        return warn(found, "Few conversations fit; free disk space or use --store-dir.")
    return ok(found)


def open_files(config: Config) -> Finding:
    """The limit on open files and connections of a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_MIN:
        return warn(f"{soft} open files", f"Run `ulimit -n {FILES_MIN}` before towerd serve.")
    return ok("no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} open files")


def shared_memory(config: Config) -> Finding:
    """A folder in RAM, through which the llama-server engine passes slot files."""
    if sys.platform == "darwin":
        return ok("none on macOS; the embedded engine needs none")
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    if kinds.get(str(SHM)) != "tmpfs" or not os.access(SHM, os.W_OK):
        return warn(
            f"{SHM} is not a writable tmpfs",
            "Only the llama-server engine uses it; its slot files then go to the disk.",
        )
    return ok(f"{size(shutil.disk_usage(SHM).free)} free at {SHM}")


def existing(path: Path) -> Path:
    """The nearest folder at or above `path` that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))


CHECKS = (
    Check("machine", "memory", memory),
    Check("machine", "cpu", cpu),
    Check("machine", "disk", disk),
    Check("machine", "limits", open_files),
    Check("machine", "tmpfs", shared_memory),
)
