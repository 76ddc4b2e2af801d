"""What the engine and the links that move its bytes know of each other.

The engine (transfer.py) decides what moves next; a link moves it. One lane (a thread and, on a
GPU, a stream) per direction asks for pieces and reports them back, in the order it took them.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from liveserve.kernels.base import Direction


class Kind(enum.IntEnum):
    """Why a transfer moves; the smaller goes first."""

    ON_PATH = 0
    PRELOAD = 1
    STORE = 2

    @property
    def direction(self) -> Direction:
        return Direction.STORE if self is Kind.STORE else Direction.LOAD


class State(enum.Enum):
    QUEUED = "queued"
    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (State.DONE, State.FAILED, State.CANCELLED)


class TransferError(RuntimeError):
    """A transfer did not happen."""


class SourceLost(TransferError):
    """What the transfer was to read was never completely written."""


class ChecksumError(TransferError):
    """``slot`` does not hold what was stored there (CRC-32)."""

    def __init__(self, slot: int) -> None:
        super().__init__(f"slot {slot} does not hold what was stored there (CRC-32)")
        self.slot = slot


@runtime_checkable
class Event(Protocol):
    """Something that will have happened, such as a recorded ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has. Cheap, and safe to call from another thread."""


Ready: TypeAlias = "Event | Callable[[], bool]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a transfer that moves in one copy: some blocks, some layers.

    Attributes:
        layers_after: leading layers of the transfer that are complete once this piece is.
        opens, closes: whether it is the first, the last piece of its slots.
    """

    transfer: Transfer
    block_ids: Sequence[int]
    slot_ids: Sequence[int]
    layers: range
    num_bytes: int
    layers_after: int
    opens: bool
    closes: bool


@dataclass(eq=False, slots=True)
class Transfer:
    """One submitted job, as its owner sees it. Read only; times are monotonic seconds.

    Attributes:
        number: counts up in the order of submission.
        layers: the layers that move.
        num_bytes: bytes in all.
        tag: whatever the owner gave, untouched.
        error: why it failed.
        layers_done: leading layers that have arrived completely (it grows while the transfer moves
            only if it was submitted ``layerwise``).
        bytes_done: bytes that have arrived.
        eligible_s: when nothing but other traffic kept it any more; None: not yet, or never.
        started_s: when its first piece was issued; likewise.
    """

    number: int
    kind: Kind
    block_ids: tuple[int, ...]
    slot_ids: tuple[int, ...]
    layers: range
    num_bytes: int
    tag: Any
    submitted_s: float
    state: State = State.QUEUED
    error: BaseException | None = None
    layers_done: int = 0
    bytes_done: int = 0
    eligible_s: float | None = None
    started_s: float | None = None
    finished_s: float | None = None
    work: Any = field(default=None, repr=False)

    @property
    def ended(self) -> bool:
        """Whether it is done, failed or cancelled: no byte of it will move any more."""
        return self.state.ended

    @property
    def ok(self) -> bool:
        return self.state is State.DONE


@dataclass(slots=True)
class KindStats:
    """Totals of one kind. ``queue_s``: from submission to the first piece; ``move_s``: from there
    to the end; both summed over transfers that started. ``bytes``: those that arrived."""

    submitted: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    started: int = 0
    bytes: int = 0
    queue_s: float = 0.0
    move_s: float = 0.0


@dataclass(slots=True)
class LaneStats:
    """One direction. ``busy_s``: time with bytes that could move; ``queued_bytes``: not issued."""

    pieces: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    queued_bytes: int = 0
    in_flight_bytes: int = 0

    @property
    def gbps(self) -> float:
        """Measured rate while busy, 1e9 bytes/s; 0 before anything moved."""
        return self.bytes / self.busy_s / 1e9 if self.busy_s else 0.0


@dataclass(slots=True)
class EngineStats:
    kinds: dict[Kind, KindStats] = field(default_factory=lambda: {k: KindStats() for k in Kind})
    lanes: dict[Direction, LaneStats] = field(
        default_factory=lambda: {d: LaneStats() for d in Direction}
    )


class Source(Protocol):
    """The engine as a lane sees it. Every method may be called from the lane's thread."""

    def take(self, direction: Direction, *, block: bool) -> Piece | None:
        """The next piece to issue. None: nothing now or, where it blocks, nothing ever again."""

    def issued(self, piece: Piece, fence: Any) -> None:
        """``piece`` is enqueued and complete when ``fence`` is; see ``Link.order``."""

    def finish(self, piece: Piece, error: BaseException | None = None) -> None:
        """No byte of ``piece`` will move any more; it arrived unless there is an ``error``."""

    def broken(self, direction: Direction, error: BaseException) -> None:
        """The lane has stopped for good, nothing of it moves: everything unfinished fails."""


class Link(Protocol):
    """Moves pieces between one cache and one pool."""

    @property
    def gbps(self) -> float:
        """Rate of one direction in 1e9 bytes/s, as calibrated or as set."""

    def start(self, source: Source) -> None:
        """Start to take pieces."""

    def order(self, fence: Any, stream: Any) -> None:
        """Work enqueued on ``stream`` (None: the current one) from now on waits for ``fence``."""

    def join(self) -> None:
        """Wait for the lanes to end, which they do when ``take`` says so."""


class ThreadedLink(ABC):
    """A link with one thread per direction; subclasses say what a lane does."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, source: Source) -> None:
        for direction in Direction:
            name = f"liveserve-{direction.value}"
            thread = threading.Thread(
                target=self._run, args=(direction, source), name=name, daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    @abstractmethod
    def lane(self, direction: Direction, source: Source) -> None:
        """Take and finish pieces until there will be none."""

    def _run(self, direction: Direction, source: Source) -> None:
        try:
            self.lane(direction, source)
        except BaseException as exc:
            source.broken(direction, exc)
