"""Which chunks the vocoder takes together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from liveserve.scheduler.one_shot import Chunk, one_shot_batch
from liveserve.scheduler.urgency import Urgency

U0, U1, U2 = Urgency


def chunk(name, urgency, size, buffer_s=None, can_wait=False):
    return Chunk(name, urgency, buffer_s, size, can_wait)


def batch(*chunks, token_s=0.001, limit_s=0.15, waits=False):
    return one_shot_batch(chunks, token_s, limit_s, waits)


def test_equal_chunks_share_a_step_up_to_its_limit():
    chunks = [chunk(str(n), U2, 50, 3.0) for n in range(5)]
    assert batch(*chunks) == ["0", "1", "2"]
    assert batch(*chunks, limit_s=1.0) == ["0", "1", "2", "3", "4"]
    assert batch(*chunks, limit_s=0.01) == ["0"]  # one may always run


def test_a_short_chunk_does_not_wait_for_padding():
    assert batch(chunk("short", U0, 10, 0.3), chunk("long", U0, 50, 0.4)) == ["short"]
    assert batch(chunk("long", U0, 50, 0.3), chunk("short", U0, 10, 0.4)) == ["long"]
    assert batch(chunk("a", U0, 40, 0.3), chunk("b", U0, 44, 0.4)) == ["a", "b"]


def test_first_audio_passes_a_near_underrun_that_is_in_time_after_it():
    near, first = chunk("near", U0, 50, 0.3), chunk("first", U1, 4)
    assert batch(near, first) == ["first"]
    assert batch(near._replace(buffer_s=0.052), first) == ["near"]  # it would come too late
    assert batch(near, first._replace(size=60))[0] == "near"  # not the shorter one


def test_while_something_is_urgent_those_wait_that_can():
    safe = chunk("safe", U2, 50, 3.0, can_wait=True)
    needy = chunk("needy", U2, 50, 0.6)
    assert batch(safe) == ["safe"]
    assert batch(safe, waits=True) == []
    assert batch(needy, safe, waits=True) == ["needy"]
    assert batch(chunk("first", U1, 50), safe) == ["first"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(Urgency),
            st.integers(1, 100),
            st.none() | st.floats(-1, 5),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.floats(0, 0.01),
    st.floats(0.001, 1),
    st.booleans(),
)
def test_laws(rows, token_s, limit_s, waits):
    chunks = [chunk(str(n), u, size, b, can) for n, (u, size, b, can) in enumerate(rows)]
    taken = one_shot_batch(chunks, token_s, limit_s, waits)
    sizes = {c.request_id: c.size for c in chunks}
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(sizes)
    if len(taken) > 1:
        assert len(taken) * max(sizes[name] for name in taken) * token_s <= limit_s
    # Somebody always runs, unless all can wait.
    if any(c.urgency is not U2 or not c.can_wait for c in chunks) or (chunks and not waits):
        assert taken
    # No padding to twice its length.
    assert all(2.3 * sizes[name] > max(sizes[n] for n in taken) for name in taken)
