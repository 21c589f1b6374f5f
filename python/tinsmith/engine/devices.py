"""Chooses the engine's device to run on, and lists the machine's GPUs.

A device's name is its kind, and for a GPU that is not the first one ":" and its ordinal: cuda:1.
Names with commas between them are the devices of a model's stages, in the order of its layers.
"""

import os
import re
import sys
from functools import cache
from typing import NamedTuple

from tinsmith import _core
from tinsmith.system.format import counted

NAME = re.compile(r"(cpu|cpu-bf16|cpu-int16|cuda|cuda-emulated)|(cuda|cuda-emulated):([0-9]{1,3})")
GPUS = ("cuda", "cuda-emulated")


class Card(NamedTuple):
    """A GPU of this machine."""

    device: str  # the engine's name for it
    title: str  # NVIDIA's
    bytes: int
    capability: tuple[int, int]


def choose_device(name: str, threads: int = 0, stages: int = 1) -> str:
    """The device to run on, or those of a model's stages: this one, and as many GPUs after it.
    "auto" is the CPU; this is printed once on stderr, with the number of threads (0: one for each
    core). ValueError if there are too few GPUs.

    cuda must be named: its kernels have run in the emulator only, and no card has confirmed their
    numbers yet.
    """
    if not 1 <= stages <= _core.STAGES:
        raise ValueError(f"stages are from 1 to {_core.STAGES}; {stages} came")
    device = _choose_one(name, threads)
    if kind_of(device) not in GPUS:
        return ",".join([device] * stages)
    if stages == 1:
        return device
    names = [card.device for card in cards(kind_of(device))]
    gpus = [device, *(one for one in names if one != device)]
    return ",".join(take(gpus, stages, f"{stages} stages"))


def take(gpus: list[str], count: int, whose: str) -> list[str]:
    """The first `count` of these GPUs. ValueError if there are fewer than that; `whose` says who
    needs them."""
    if count > len(gpus):
        has = counted(len(gpus), "GPU")
        raise ValueError(f"{whose} need {counted(count, 'GPU')}, and this machine has {has}")
    return gpus[:count]


def _choose_one(name: str, threads: int) -> str:
    if name == "auto":
        _say_cpu(threads or len(os.sched_getaffinity(0)), not _core.devices("cuda")["cuda"])
        return "cpu"
    if not NAME.fullmatch(name):
        raise ValueError(
            f"there is no device {name!r}: it is auto, cpu, cpu-bf16, cpu-int16, cuda, or cuda:1 "
            "and so on for another card"
        )
    if reason := _core.devices(name)[name]:
        raise RuntimeError(f"the device {name} can't be used: {reason}")
    return name.removesuffix(":0")


def kind_of(device: str) -> str:
    """The kind of a device: cuda of cuda:1, and of cuda,cuda:1."""
    return re.split("[:,]", device, maxsplit=1)[0]


def first_of(kind: str, count: int) -> str:
    """The first GPUs of a process, as a device."""
    return ",".join([kind, *(f"{kind}:{card}" for card in range(1, count))])


def stages_of(device: str) -> list[str]:
    """The device of each stage."""
    return device.split(",")


def cards(kind: str = "cuda") -> list[Card]:
    """The GPUs of this machine; RuntimeError says why there is none. None of them is opened."""
    return [Card(*row) for row in _core.cards(kind)]


def card_bytes(device: str) -> int | None:
    """The total memory of a GPU, or of those of all stages, in bytes; None if unknown."""
    try:
        known = {card.device: card.bytes for card in cards(kind_of(device))}
        return sum(known[one] for one in stages_of(device))
    except (RuntimeError, KeyError):
        return None


@cache
def say(sentence: str) -> None:
    """Prints a sentence, once in a process."""
    print(f"tinsmith: {sentence}", file=sys.stderr)


def say_notes(core: _core.Model) -> None:
    """Prints, once in a process, each thing that the device does slower than it could."""
    for note in core.notes:
        say(note)


@cache
def _say_cpu(threads: int, gpu: bool) -> None:
    """Prints the device, once in a process; mentions a GPU only if one could be used."""
    more = "; --device cuda would take the GPU, on which it is not tested yet" if gpu else ""
    told = f"tinsmith computes on the CPU, {counted(threads, 'thread')}{more}"
    print(told, file=sys.stderr)
