"""Seam: after a barge-in the conversation keeps what was heard, cut at the playback point.

Qwen3-Omni streams text and audio unaligned, so the host keeps an answer in the history only if all
of it was acknowledged, else nothing of it (`text_requires_complete_audio` in
vllm_omni/engine/duplex/session/engine_session.py). Here the text is cut in proportion: the heard
seconds over the seconds that the whole text takes to say, which is known once the audio is
complete, and until then is the session's measured pace times its text tokens. A cut inside a word
drops the word.
"""

from __future__ import annotations

from typing import Any

from vllm_omni.engine.duplex.session.engine_session import DuplexEngineSession

from liveserve.host.seam import expect
from liveserve.plane import current_plane


class LiveEngineSession(DuplexEngineSession):
    """`DuplexEngineSession` that cuts unaligned answers at the playback point."""

    def truncate_history_item(self, item_id: str, **kwargs: Any) -> bool:
        self._liveserve_item = item_id
        return super().truncate_history_item(item_id, **kwargs)

    def _truncate_message_to_audio_ms(self, message: dict[str, object], **kwargs: Any) -> bool:
        before = message.get("content")
        changed = super()._truncate_message_to_audio_ms(message, **kwargs)
        after = message.get("content")
        if isinstance(before, str) and isinstance(after, str):
            message["content"] = whole_words(before, after)
        return changed

    def _text_chars_for_audio_ms(
        self, audio_end_ms: int, text_len: int, *, marks: Any = None, playback: Any = None
    ) -> int:
        chars = super()._text_chars_for_audio_ms(
            audio_end_ms, text_len, marks=marks, playback=playback
        )
        playback = playback or self.playback
        if chars or audio_end_ms <= 0 or not playback.text_requires_complete_audio:
            return chars
        plane = current_plane()
        if plane is None or not plane.monitor.switches.history:
            return chars
        sent_ms = max(playback.sent_ms, playback.generated_ms)
        total_ms = float(sent_ms)
        if not playback.audio_complete:
            item_id = getattr(self, "_liveserve_item", "") or f"item_{self.active_response_id}"
            response_id = item_id.removeprefix("item_")
            speech_s = plane.tracker.speech_s(self.session_id, response_id)
            if speech_s is None:
                return chars
            total_ms = max(total_ms, 1e3 * speech_s)
        return heard_chars(text_len, audio_end_ms, total_ms)


def heard_chars(text_len: int, audio_end_ms: float, total_ms: float) -> int:
    """Characters of a text of ``text_len`` that were said by ``audio_end_ms`` of ``total_ms``."""
    if total_ms <= 0:
        return 0
    return int(text_len * min(1.0, max(0.0, audio_end_ms / total_ms)))


def whole_words(text: str, cut: str) -> str:
    """``cut``, the beginning of ``text``, without its last word if that is not whole.

    Text without spaces (or in a script without them) is left as it was cut.
    """
    if not cut or len(cut) >= len(text) or text[len(cut)].isspace():
        return cut
    head, space, _ = cut.rpartition(" ")
    return head.rstrip() if space else cut


def install() -> None:
    """Put the class where the host's session manager looks it up."""
    from vllm_omni.engine.duplex.session import manager

    expect(
        getattr(manager, "DuplexEngineSession", None) in (DuplexEngineSession, LiveEngineSession),
        "session.manager.DuplexEngineSession is not the host's class",
    )
    for name in (
        "truncate_history_item", "_truncate_message_to_audio_ms", "_text_chars_for_audio_ms",
    ):  # fmt: skip
        expect(hasattr(DuplexEngineSession, name), f"DuplexEngineSession.{name} is gone")
    manager.DuplexEngineSession = LiveEngineSession
