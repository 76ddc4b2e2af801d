"""Which chunks a one-shot stage (the vocoder) takes in its next step.

A step pads its chunks to the longest and cannot be interrupted, so it takes about as long as their
number times the longest of them. Three rules follow: an urgent chunk does not share a step with a
longer one; a step stays short; and while somebody waits for first audio, chunks that can wait do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from liveserve.scheduler.urgency import Urgency

# A chunk joins a step if that makes the step longer by no more than this times the chunk alone.
_PADDING = 1.25


class Chunk(NamedTuple):
    """One request's next chunk.

    Attributes:
        buffer_s: P_i^s; None if unknown.
        size: tokens, as the model pads them.
        can_wait: its listener is safe without it for now.
    """

    request_id: str
    urgency: Urgency
    buffer_s: float | None
    size: int
    can_wait: bool


def one_shot_batch(
    chunks: Sequence[Chunk], token_s: float, limit_s: float, somebody_waits: bool
) -> list[str]:
    """The request ids of the next step, in order.

    Args:
        chunks: those at hand, most urgent first.
        token_s: seconds that a step takes per padded token; 0 if not known yet.
        limit_s: how long a step may take (one chunk may always run).
        somebody_waits: a session waits for its first audio, here or in another stage.
    """
    urgent = somebody_waits or any(c.urgency is not Urgency.U2 for c in chunks)
    if urgent:
        chunks = [c for c in chunks if c.urgency is not Urgency.U2 or not c.can_wait]
    if not chunks:
        return []
    first = _first(chunks, token_s)
    batch, longest = [first.request_id], first.size
    for chunk in chunks:
        if chunk is first:
            continue
        size = (len(batch) + 1) * max(longest, chunk.size)
        if size * token_s > limit_s:
            break
        if size - len(batch) * longest <= _PADDING * chunk.size:
            batch.append(chunk.request_id)
            longest = max(longest, chunk.size)
    return batch


def _first(chunks: Sequence[Chunk], token_s: float) -> Chunk:
    """The most urgent chunk; or a first audio, if the most urgent is in time after it as well."""
    leader = chunks[0]
    if leader.buffer_s is None:
        return leader
    for chunk in chunks:
        if chunk.urgency is Urgency.U1:
            in_time = leader.buffer_s >= (chunk.size + leader.size) * token_s
            return chunk if in_time and chunk.size < leader.size else leader
    return leader
