"""What the two halves of the connector say to each other: jobs down, how they ended up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from liveserve.kvtier.transfer_base import Kind

if TYPE_CHECKING:
    from liveserve.kvtier.tier import Ticket


@dataclass(frozen=True, slots=True)
class Job:
    """Copy between GPU blocks and DRAM slots, pair by pair."""

    number: int
    kind: Kind
    block_ids: tuple[int, ...]
    slot_ids: tuple[int, ...]


def job_of(number: int, kind: Kind, tickets: Iterable[Ticket[Any]]) -> Job:
    """The copies of ``tickets`` as one job."""
    pairs = [(ticket.gpu_block, ticket.slot) for ticket in tickets]
    return Job(number, kind, tuple(b for b, _ in pairs), tuple(s for _, s in pairs))


@dataclass(frozen=True, slots=True)
class Orders:
    """What the worker is to do now: jobs to begin, then numbers of jobs to cancel and of preloads
    that somebody waits for by now."""

    begin: tuple[Job, ...] = ()
    cancel: tuple[int, ...] = ()
    promote: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.begin or self.cancel or self.promote)


@dataclass(frozen=True, slots=True)
class Ended:
    """A job is over: no byte of it will move any more.

    Attributes:
        ok: all of it was copied. False: it failed or was cancelled, and what it was to write is
            not to be used.
        corrupt: slots that do not hold what was stored there.
        error: why it failed, for the log.
    """

    number: int
    ok: bool
    corrupt: tuple[int, ...] = ()
    error: str = ""


def merge(first: Ended, second: Ended) -> Ended:
    """One job as two workers saw it."""
    return Ended(
        first.number,
        first.ok and second.ok,
        tuple(sorted({*first.corrupt, *second.corrupt})),
        first.error or second.error,
    )
