"""Conversations over a trace of text requests: who speaks, listens and thinks when.

Mooncake's requests name no sessions. A request continues a session when its prompt holds, block
for block, all of an earlier prompt of that session but its last, started block (that block's id
changes as it fills); a prompt that shares less is another session with a shared prefix. Histories
of fewer than two blocks cannot be told apart from the prefix that all prompts share, and begin a
session each.

Overlays say what a server with voice users would have seen:

``voice``: the order of turns, the prompts and the answers' lengths are the trace's, and the first
    turn of a session comes when it came. Each later turn is timed by the model below: first audio,
    the whole answer played at 1×, the user's reply gap, the new utterance. This is how a voice
    user would have gone through the same conversation.
``fitted``: every turn comes when it came. Gap and utterance are drawn from the model, and the
    answer is taken to have played for what is left (at most ``max_fitted_s``; the rest is gap).
    A last answer plays for a time drawn from all the others, so that it does not tell that it is
    the last.
``typed``: every turn comes when it came, the answer plays for its length in the trace or until the
    next utterance, and the user's gap is whatever is left: the times of people who type and read.
``none``: every turn comes when it came, and no interaction is seen.

The server sees speech start, the end of playback (once the first audio is out), and that a client
hung up: ``hangup_fraction`` of the users do so one reply gap after the last answer was heard, and
the others fall silent. It never sees a next turn before it comes. Whether a turn is the last is not
told by anything it sees.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from liveserve.bench.traces import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRequest

OVERLAYS = ("voice", "fitted", "typed", "none")


@dataclass(frozen=True, slots=True)
class VoiceModel:
    """How voice users behave. Times in seconds; gaps and utterances are log-normal.

    Attributes:
        token_s: speech per text token (150 words a minute).
        gap_median_s: from the end of playback to the next speech, over all sessions.
        gap_session_sigma: spread of a session's own median around that, in log space.
        gap_sigma: spread of a session's gaps around its median.
        barge_in_fraction: answers that the user speaks over, at a uniform point.
        hangup_fraction: users who close the session when they are done.
    """

    first_audio_s: float = 1.0
    token_s: float = 0.3
    gap_median_s: float = 2.0
    gap_session_sigma: float = 0.6
    gap_sigma: float = 0.5
    utterance_median_s: float = 4.0
    utterance_sigma: float = 0.5
    barge_in_fraction: float = 0.0
    hangup_fraction: float = 0.8
    max_fitted_s: float = 300.0


class Kind(IntEnum):
    """Order at equal times."""

    CLOSE = 0
    SPEECH = 1
    TURN = 2
    PLAYING = 3


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that the server sees.

    Attributes:
        request: index of the trace's request, for TURN.
        ends_s: PLAYING: when the answer will have been played.
        is_last: TURN: the session has no further one. For bounds; no policy may read it.
    """

    at_s: float
    kind: Kind
    session: int
    request: int = -1
    ends_s: float = 0.0
    is_last: bool = False


def sessions_of(requests: Sequence[TraceRequest]) -> list[int]:
    """The session of each request, numbered in order of appearance.

    Raises:
        TraceError: the trace has neither sessions nor prompt blocks.
    """
    names: dict[object, int] = {}
    tails: dict[int, int] = {}
    found: list[int] = []
    for request in requests:
        if request.session is not None:
            found.append(names.setdefault(request.session, len(names)))
            continue
        if not request.blocks:
            raise TraceError("the trace has neither sessions nor prompt blocks to tell them by")
        blocks = request.blocks
        session = next((tails[b] for b in reversed(blocks) if b in tails), None)
        if session is None:
            session = len(names)
            names[session] = session
        # The first block alone is no history: every prompt may begin with it.
        tails.update(dict.fromkeys(blocks[max(1, len(blocks) - 2) :], session))
        found.append(session)
    return found


def of_long_sessions(requests: Sequence[TraceRequest], min_turns: int) -> list[TraceRequest]:
    """The requests of sessions with at least ``min_turns`` turns.

    Raises:
        TraceError: there are none.
    """
    sessions = sessions_of(requests)
    turns = Counter(sessions)
    kept = [r for r, s in zip(requests, sessions, strict=True) if turns[s] >= min_turns]
    if not kept:
        raise TraceError(f"the trace has no session of {min_turns} turns")
    return kept


def with_blocks(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Requests whose prompts have blocks: a session's history, where the trace gives none."""
    if all(request.blocks for request in requests):
        return list(requests)
    tokens: dict[str | None, int] = defaultdict(int)
    ids: dict[str | None, list[int]] = defaultdict(list)
    filled: list[TraceRequest] = []
    fresh = 0
    for request in requests:
        if request.session is None:
            raise TraceError("the trace has neither sessions nor prompt blocks to tell them by")
        history = ids[request.session]
        tokens[request.session] += request.input_tokens
        wanted = -(-tokens[request.session] // MOONCAKE_BLOCK_TOKENS)
        started = wanted - len(history)
        history += range(fresh, fresh + started)
        fresh += started
        filled.append(replace(request, input_tokens=tokens[request.session], blocks=tuple(history)))
        # A block that this prompt only starts is another block once it is full.
        del history[tokens[request.session] // MOONCAKE_BLOCK_TOKENS :]
        tokens[request.session] += request.output_tokens
    return filled


def lay_over(
    requests: Sequence[TraceRequest], overlay: str, model: VoiceModel, seed: int
) -> list[Happening]:
    """What the server sees, in order. ``requests`` have blocks (see `with_blocks`).

    Raises:
        ValueError: no such overlay.
        TraceError: as `sessions_of`.
    """
    if overlay not in OVERLAYS:
        raise ValueError(f"overlay {overlay!r} is not one of {', '.join(OVERLAYS)}")
    draw = random.Random(seed)
    turns: dict[int, list[int]] = defaultdict(list)
    for index, session in enumerate(sessions_of(requests)):
        turns[session].append(index)
    pauses_s = [
        requests[after].at_s - requests[before].at_s
        for indices in turns.values()
        for before, after in itertools.pairwise(indices)
    ]
    seen: list[Happening] = []
    for session, indices in turns.items():
        seen += _one_session(requests, session, indices, overlay, model, draw, pauses_s or [0.0])
    seen.sort(key=lambda happening: (happening.at_s, happening.kind))
    return seen


def _one_session(
    requests: Sequence[TraceRequest],
    session: int,
    indices: Sequence[int],
    overlay: str,
    model: VoiceModel,
    draw: random.Random,
    pauses_s: Sequence[float],
) -> list[Happening]:
    def around(median_s: float, sigma: float) -> float:
        return draw.lognormvariate(math.log(median_s), sigma)

    own_median_s = around(model.gap_median_s, model.gap_session_sigma)
    seen: list[Happening] = []
    turn_s = requests[indices[0]].at_s
    speech_s = turn_s - around(model.utterance_median_s, model.utterance_sigma)
    for index, after in zip(indices, (*indices[1:], None), strict=True):
        request = requests[index]
        is_last = after is None
        seen.append(Happening(turn_s, Kind.TURN, session, index, is_last=is_last))
        utterance_s = around(model.utterance_median_s, model.utterance_sigma)
        gap_s = around(own_median_s, model.gap_sigma)
        if after is not None and requests[after].gap_s is not None:
            gap_s = requests[after].gap_s or 0.0
        audio_s = turn_s + model.first_audio_s
        played_s = request.output_tokens * model.token_s
        if draw.random() < model.barge_in_fraction:
            interrupted_s: float | None = draw.random() * played_s
        else:
            interrupted_s = None
        if overlay == "voice":
            ends_s = audio_s + played_s
            silent_s = gap_s if interrupted_s is None else interrupted_s - played_s
            next_s = ends_s + silent_s + utterance_s
        else:
            pause_s = requests[after].at_s - turn_s if after is not None else math.inf
            next_s = turn_s + pause_s
            if overlay == "fitted":
                known_s = pause_s if after is not None else draw.choice(pauses_s)
                room_s = known_s - model.first_audio_s - gap_s - utterance_s
                played_s = min(max(0.0, room_s), model.max_fitted_s)
            ends_s = audio_s + played_s
        if overlay == "none":
            turn_s = next_s
            continue
        seen.append(Happening(speech_s, Kind.SPEECH, session))
        speech_s = next_s - utterance_s
        if audio_s < next_s:
            seen.append(Happening(audio_s, Kind.PLAYING, session, ends_s=ends_s))
        if is_last and draw.random() < model.hangup_fraction:
            seen.append(Happening(ends_s + gap_s, Kind.CLOSE, session))
        # A quick next turn: the user began to speak before this turn was even asked for.
        speech_s = max(speech_s, turn_s)
        turn_s = next_s
    return seen
