"""POST /liveserve/prefetch: what is asked for, what is refused, and who is told."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient

from liveserve.config import LiveServeConfig
from liveserve.events import Batch, Prefetch, decode_batch, encode
from liveserve.host import prefetch
from liveserve.monitor import MAX_PREFETCHES, Monitor
from liveserve.session import SessionTable


class Server:
    """The route with engines that note what they are told."""

    def __init__(self) -> None:
        self.told: list[Prefetch] = []
        self.error: Exception | None = None
        app, router = FastAPI(), APIRouter(prefix="/liveserve")
        prefetch.add_route(router, self._send, lambda: self)
        app.include_router(router)
        self.http = TestClient(app)

    async def _send(self, asked: Prefetch) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(asked)

    async def get_tokenizer(self) -> Server:
        return self

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def post(self, body: object):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post("/liveserve/prefetch", content=content)


@pytest.fixture
def server():
    return Server()


def test_a_session_a_text_and_token_ids_can_be_asked_for(server):
    answers = [
        server.post({"session_id": "s", "within_s": 2.5}),
        server.post({"prompt": "hello"}),
        server.post({"prompt_token_ids": [104, 101, 108, 108, 111]}),
        server.post({"session_id": "s", "compute": True}),
    ]
    assert [answer.status_code for answer in answers] == [202] * 4
    session, text, ids, computed = server.told
    assert computed == Prefetch("s", 5.0, compute=True)
    assert session == Prefetch("s", 2.5)
    assert text.token_ids == ids.token_ids == [104, 101, 108, 108, 111]
    assert text == ids  # one prefix has one name
    assert text.session_id.startswith("prefix-")
    assert answers[1].json() == {"accepted": True, "id": text.session_id, "tokens": 5}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "prefetch"),
        (b"[]", "prefetch"),
        ({}, "none"),
        ({"session_id": "s", "prompt": "x"}, "session_id and prompt"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "s" * 513}, "session_id"),
        ({"session_id": "s", "within_s": -1}, "within_s"),
        ({"session_id": "s", "within_s": 1e9}, "within_s"),
        (b'{"session_id": "s", "within_s": NaN}', "prefetch"),
        ({"session_id": "s", "when": 1}, "when"),
        ({"session_id": "s", "compute": 1}, "compute"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1 << 40]}, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_bad_bodies_are_refused_by_name(server, body, named):
    answer = server.post(body)
    assert answer.status_code == 400
    assert named in answer.json()["detail"]
    assert not server.told


def test_what_is_too_long_is_refused(server, monkeypatch):
    monkeypatch.setattr(prefetch, "MAX_TOKENS", 4)
    assert "5 tokens" in server.post({"prompt": "hello"}).json()["detail"]
    monkeypatch.setattr(prefetch, "MAX_BODY_BYTES", 1000)
    assert server.post({"prompt": "x" * 2000}).status_code == 413


@pytest.mark.parametrize(("error", "status"), [(KeyError("s"), 404), (BufferError(), 429)])
def test_no_such_session_and_busy_engines_are_told_apart(server, error, status):
    server.error = error
    answer = server.post({"session_id": "s"})
    assert answer.status_code == status
    assert answer.json()["detail"].startswith("prefetch: ")


async def test_every_engine_is_told_once_and_too_much_is_refused():
    sent: list[Batch] = []

    async def send(payload: bytes) -> bytes:
        sent.append(decode_batch(payload))
        raise RuntimeError("not needed")

    monitor = Monitor(LiveServeConfig(), SessionTable(4), lambda: {(0, 0): send})
    asked = Prefetch("s", 1.0, [1, 2, 3])
    for _ in range(MAX_PREFETCHES):
        assert monitor.prefetch(asked)
    assert not monitor.prefetch(asked)
    (link,) = monitor.links.values()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            await monitor._exchange(link, detail=False)
    assert [len(batch.prefetch) for batch in sent] == [MAX_PREFETCHES, 0]
    assert sent[0].prefetch[0] == asked
    assert monitor.prefetch(asked)
    assert not Monitor(LiveServeConfig(), SessionTable(4), dict).prefetch(asked)
    assert decode_batch(encode(Batch("b", 0.0, 0, []))).prefetch == []
