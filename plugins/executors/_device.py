"""Where a model computes: the CPU, or a CUDA device; whether it is there, and how one waits for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.core.errors import ConfigError


def device_of(wish: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` means here.

    Raises:
        ConfigError: it is not there; says what there is.
    """
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    if wish == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        cause = "has no CUDA" if torch.version.cuda is None else f"has CUDA {torch.version.cuda} and finds no device"
        raise ConfigError(f"executor torch: there is no device {wish!r}: torch {torch.__version__} {cause}; use cpu")
    _, _, number = wish.partition(":")
    index = int(number) if number else 0
    if index >= count:
        raise ConfigError(
            f"executor torch: there is no device {wish!r}: this machine has {count}, cuda:0 to cuda:{count - 1}"
        )
    return torch.device("cuda", index)


@contextmanager
def working_on(device: torch.device) -> Iterator[None]:
    """Inside, kernels of this thread that name no device are launched on this one."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


class Fence:
    """A place in the order of what a device does. On the CPU, which does at once what it is told, all are passed.

    Used in turn: ``mark``, then ``wait`` (any number of times, from any thread), then ``mark`` again.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def mark(self) -> None:
        """This is the place: after all that this thread has launched on the device. Mutates."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return when the device has passed the place that was marked last; at once where none was."""
        if self._event is not None:
            self._event.synchronize()


def lost(device: torch.device) -> str | None:
    """Why a device computes nothing any more, or ``None`` where it does. Waits for what it is doing.

    An error such as an illegal access stays with the process: every later call reports it again.
    """
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"device {device} is lost: {error}"
    return None


def pages_that_fit(device: torch.device, part: float, bytes_per_page: int) -> int:
    """Pages such that ``part`` of the device's memory is in use, what is loaded already included.

    Raises:
        ConfigError: not one fits.
    """
    free, total = map(int, torch.cuda.mem_get_info(device))
    room = int(part * total) - (total - free)
    if room < bytes_per_page:
        raise ConfigError(
            f"executor torch: memory_part {part} of {total >> 20} MiB on {device} leaves no room for KV: "
            f"{(total - free) >> 20} MiB are in use"
        )
    return room // bytes_per_page


def check_room(device: torch.device, num_pages: int, bytes_per_page: int) -> None:
    """Raise ``ConfigError`` where so many pages can never be in memory: the system would promise it all the same, and
    end the process in the middle of somebody's request."""
    wanted = num_pages * bytes_per_page
    if device.type == "cuda":
        there, where = int(torch.cuda.mem_get_info(device)[1]), str(device)
    else:
        there, where = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
    if wanted > there:
        raise ConfigError(
            f"executor torch: {num_pages} KV pages of {bytes_per_page} bytes are {wanted / 2**30:.1f} GiB, and {where} "
            f"has {there / 2**30:.1f} GiB of memory: lower kv_memory or num_pages"
        )
