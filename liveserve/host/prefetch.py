"""``POST /liveserve/prefetch``: somebody says which KV will be needed soon.

A JSON object with one of ``session_id`` (the history of a live session), ``prompt`` (text that the
next prompt begins with, as the model sees it) or ``prompt_token_ids``; and ``within_s``, seconds
until it is needed. What is in DRAM of it is loaded to the GPU, best effort: behind what requests
wait for, and only if it evicts nothing that is needed sooner. With ``"compute": true`` what is in
no tier is computed, as while a user speaks (`liveserve.host.warmup`).
"""

from __future__ import annotations

import hashlib
import inspect
from array import array
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, HTTPException, Request

from liveserve.events import Prefetch

MAX_BODY_BYTES = 8 << 20
MAX_TOKENS = 1 << 20
_TOKEN = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class PrefetchBody(msgspec.Struct, forbid_unknown_fields=True):
    session_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] | None = None
    prompt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    prompt_token_ids: (
        Annotated[list[_TOKEN], msgspec.Meta(min_length=1, max_length=MAX_TOKENS)] | None
    ) = None
    within_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 5.0
    compute: bool = False


Encode = Callable[[str], Awaitable[list[int]]]


async def read(body: bytes, encode: Encode) -> Prefetch:
    """What ``body`` asks for; ``encode`` makes token ids of text.

    Raises:
        ValueError: names the field, and what it takes.
    """
    try:
        asked = msgspec.json.decode(body, type=PrefetchBody)
    except msgspec.MsgspecError as exc:
        raise ValueError(
            f"prefetch: {exc}; give a JSON object with session_id, prompt or prompt_token_ids, "
            "within_s (0 to 600 seconds), and compute (true or false)"
        ) from None
    given = [
        name
        for name in ("session_id", "prompt", "prompt_token_ids")
        if getattr(asked, name) is not None
    ]
    if len(given) != 1:
        raise ValueError(
            "prefetch: give exactly one of session_id, prompt and prompt_token_ids, not "
            f"{' and '.join(given) or 'none'}"
        )
    if asked.session_id is not None:
        return Prefetch(asked.session_id, asked.within_s, compute=asked.compute)
    ids = asked.prompt_token_ids
    if ids is None:
        assert asked.prompt is not None
        ids = await encode(asked.prompt)
        if not 0 < len(ids) <= MAX_TOKENS:
            raise ValueError(f"prefetch: prompt has {len(ids)} tokens; 1 to {MAX_TOKENS} are taken")
    digest = hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:16]
    return Prefetch(f"prefix-{digest}", asked.within_s, ids, asked.compute)


def add_route(
    router: APIRouter, send: Callable[[Prefetch], Awaitable[None]], client: Callable[[], Any]
) -> None:
    """Args:
    send: tells the engines; raises KeyError (no such session) and BufferError (busy).
    client: the host's engine client, which has the tokenizer.
    """

    async def encode(text: str) -> list[int]:
        engine = client()
        if engine is None:
            raise ValueError("prefetch: this server has no tokenizer yet; give prompt_token_ids")
        tokenizer = engine.get_tokenizer()
        if inspect.isawaitable(tokenizer):
            tokenizer = await tokenizer
        return list(tokenizer.encode(text, add_special_tokens=False))

    @router.post("/prefetch", status_code=202)
    async def prefetch(request: Request) -> dict[str, object]:
        """Load soon what will be needed: a session's history, or the beginning of a prompt."""
        try:
            asked = await read(await _body(request), encode)
            await send(asked)
        except ValueError as exc:
            raise HTTPException(400, str(exc)) from None
        except KeyError:
            raise HTTPException(
                404,
                "prefetch: session_id names no live session; GET /liveserve/sessions lists them",
            ) from None
        except BufferError:
            raise HTTPException(
                429, "prefetch: the engines have yet to hear of earlier ones; try again"
            ) from None
        return {"accepted": True, "id": asked.session_id, "tokens": len(asked.token_ids)}


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"prefetch: the body is above {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
