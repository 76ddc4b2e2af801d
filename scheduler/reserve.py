"""KV reserved ahead: who may enter a block pool and grow in it, so that nobody is preempted.

For stages where preempting a request loses its output (vLLM-Omni's). Two rules:

- **Safe**, which holds always: there is an order in which everybody in the pool can finish, even if
  each takes every block that it may take (the banker's algorithm for one resource, Dijkstra 1965).
  Nobody enters and nobody grows unless the state is safe afterwards. Someone can always go on,
  and whatever lengths turn out, nothing has to be given back early.
- **Likely**, for entering only: what everybody is likely to take yet fits the free blocks. A pool
  that is only safe fills with requests that then finish one after another, and a request that may
  not grow is a gap for its listener.

The trade. Reserving everybody's worst case (safe and likely are then the same) never stalls
anybody, but where answers are far shorter than max_tokens it leaves most of the pool empty while
sessions wait for first audio. Here the worst case counts in full until shorter answers have been
seen (`Lengths`); a wrong guess costs the least urgent a wait, never a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# What is left of the longest answer's share after every further answer.
_DECAY = 0.98


class Claim(NamedTuple):
    """One request's KV blocks.

    Attributes:
        held: blocks that become free when it ends. A block that others use too is not one.
        more: further blocks that it may take at most.
        likely: further blocks that it is likely to take.
        ends: it ends by itself. One that waits for its user's input may not: what it may take is
            kept free for it, and nobody counts on what it holds.
    """

    held: int
    more: int
    likely: int
    ends: bool = True

    def grown(self, blocks: int) -> Claim:
        """The claim after ``blocks`` further blocks."""
        more = max(0, self.more - blocks)
        return Claim(self.held + blocks, more, max(0, self.likely - blocks), self.ends)


class Lengths:
    """How much of what they may generate requests do generate.

    Attributes:
        share: 0 to 1. The largest share of late; older ones count for less, so that one long
            answer is forgotten after about fifty short ones. 1 until an answer has been seen.
    """

    def __init__(self) -> None:
        self.share = 1.0

    def learn(self, tokens: int, max_tokens: int) -> None:
        """An answer has ended, by itself or interrupted, with ``tokens`` of ``max_tokens``."""
        self.share = max(min(1.0, tokens / max(1, max_tokens)), self.share * _DECAY)


def is_safe(free: int, claims: Sequence[Claim]) -> bool:
    """Whether all of ``claims`` can be met to the end, in some order, from ``free`` blocks."""
    ending = []
    for claim in claims:
        if claim.ends:
            ending.append((claim.more, claim.held))
        else:
            free -= claim.more
    if free < 0:
        return False
    # Whoever wants least goes first: if that order fails, every order does.
    for more, held in sorted(ending):
        if more > free:
            return False
        free += held
    return True


def may_enter(free: int, claims: Sequence[Claim], new: Claim, first: int) -> bool:
    """Whether a request may be admitted.

    Args:
        free: free blocks.
        claims: of everybody who holds blocks.
        new: of the request, which holds none.
        first: blocks that it takes at once.
    """
    if first > free or sum(claim.likely for claim in claims) + new.likely > free:
        return False
    return is_safe(free - first, [*claims, new.grown(first)])


def may_grow(free: int, claims: Sequence[Claim], wants: Sequence[int]) -> list[bool]:
    """Who may take the blocks of this round.

    Args:
        free: free blocks.
        claims: of everybody who holds blocks, most urgent first.
        wants: blocks that each would take now.

    In a safe state at least one of those who want something and end by themselves may. In an
    unsafe one, which these rules never lead to, whatever is free goes out in order.
    """
    if sum(max(claim.more, want) for claim, want in zip(claims, wants, strict=True)) <= free:
        return [True] * len(claims)
    state = list(claims)
    careful = is_safe(free, state)
    granted = []
    for index, (claim, want) in enumerate(zip(claims, wants, strict=True)):
        after = [*state[:index], claim.grown(want), *state[index + 1 :]] if want else state
        go = want <= free and (not want or not careful or is_safe(free - want, after))
        if go:
            state, free = after, free - want
        granted.append(go)
    return granted
