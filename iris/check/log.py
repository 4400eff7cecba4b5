"""What a rank writes down while it runs: accesses, and what orders them.

A *task* is what runs on its own: the host of a rank (slot 0) or one program of a kernel launch
(slot 1 + its number). Entries of one rank are in the order in which they happened there. Those that
order tasks of different ranks carry a ticket, drawn from one counter of the world, by which ranks'
logs are put together.
"""

from typing import NamedTuple

import numpy as np

LOCAL = -1  # owner of memory that only this rank can address
HOST = 0  # slot of the host

# Kinds of access, as reports say them. Atomics below scope sys are atomic for their own rank only.
READ, WRITE, LOOK = "read", "wrote", "polled"
ATOMIC, ATOMIC_HERE = "atomically changed", "atomically changed, for its own programs only,"


class Access(NamedTuple):
    """Bytes ``starts[i] .. stops[i]`` of the memory of ``owner``, touched at ``where``."""

    kind: str
    slot: int
    owner: int
    starts: np.ndarray
    stops: np.ndarray
    where: str


class Atomic(NamedTuple):
    """One atomic change of a word; ``value`` is what it holds then."""

    ticket: int
    slot: int
    owner: int
    offset: int
    size: int
    value: int
    acquires: bool
    releases: bool
    system: bool  # scope: all ranks, or the programs of this one
    where: str


class Wait(NamedTuple):
    """A wait for ``epoch`` at a flag has ended."""

    ticket: int
    slot: int
    owner: int
    offset: int
    size: int
    epoch: int
    where: str


class Fork(NamedTuple):
    """A launch of ``programs`` programs, of ``kernel``, from ``call``; ``number`` counts them."""

    programs: int
    kernel: str
    number: int
    call: str


class Join(NamedTuple):
    """All programs of the last launch have ended."""


class Arrive(NamedTuple):
    """The host came to meeting ``epoch`` of a group."""

    ticket: int
    group: int
    epoch: int


class Depart(NamedTuple):
    """The host saw every one of ``size`` members come to a meeting."""

    ticket: int
    group: int
    epoch: int
    size: int


Entry = Access | Atomic | Wait | Fork | Join | Arrive | Depart
