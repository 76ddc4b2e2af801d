"""A record of what the model computed: input rows, sampled ids and step times, for comparisons.

With ``LIVESERVE_CPU_RECORD=DIR`` in the environment, every stage appends one JSON line per model
step to ``DIR/stage<N>.jsonl``:

* ``start_s``, ``end_s``, ``requests``: monotonic times of `execute_model`, and its batch size;
* ``tokens``: per request, the tokens of this step;
* ``new``: per request that runs for the first time, the tokens of its prompt, and how many of them
  were in the prefix cache;
* ``rows``: per request, one digest per row of input embeddings (empty where a stage takes ids);
* ``sampled``: per request, the token ids sampled in this step.

Two runs computed the same iff their rows and ids agree. Recording costs time, the same in both;
the digests' is in proportion to what is computed, so with ``LIVESERVE_CPU_RECORD_ROWS=off`` there
are none.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

RECORD_ENV = "LIVESERVE_CPU_RECORD"
ROWS_ENV = "LIVESERVE_CPU_RECORD_ROWS"
_DIGEST_BYTES = 8


class RecordingRunner:
    """Mixed in front of a model runner of vLLM-Omni."""

    _record: TextIO | None = None
    _record_rows = True
    _rows: dict[str, list[str]]

    def open_record(self, stage_id: int) -> None:
        """Start recording if the environment asks for it."""
        folder = os.environ.get(RECORD_ENV)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._record = (Path(folder) / f"stage{stage_id}.jsonl").open("a", buffering=1)
            self._record_rows = os.environ.get(ROWS_ENV) != "off"
            self._rows = {}

    def _model_forward(self, *args: Any, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        if self._record is not None and self._record_rows and inputs_embeds is not None:
            self._rows = self._digests(inputs_embeds)
        return super()._model_forward(*args, inputs_embeds=inputs_embeds, **kwargs)  # type: ignore[misc]

    def _digests(self, inputs_embeds: Any) -> dict[str, list[str]]:
        starts = self.query_start_loc.np  # type: ignore[attr-defined]
        rows: dict[str, list[str]] = {}
        for index, request_id in enumerate(self.input_batch.req_ids):  # type: ignore[attr-defined]
            part = inputs_embeds[starts[index] : starts[index + 1]].detach().float().cpu().numpy()
            rows[request_id] = [
                hashlib.blake2b(row.tobytes(), digest_size=_DIGEST_BYTES).hexdigest()
                for row in part
            ]
        return rows

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._record is None:
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self._rows = {}
        start_s = time.monotonic()
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens:
            self._write(
                start_s=start_s,
                end_s=time.monotonic(),
                requests=len(scheduler_output.num_scheduled_tokens),
                tokens=scheduler_output.num_scheduled_tokens,
                new={
                    request.req_id: (len(request.prompt_token_ids), request.num_computed_tokens)
                    for request in scheduler_output.scheduled_new_reqs
                    if request.prompt_token_ids is not None
                },
                rows=self._rows,
            )
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        sampled = getattr(output, "sampled_token_ids", None)
        if self._record is not None and sampled:
            ids = {
                request_id: [int(token) for token in tokens]
                for request_id, tokens in zip(output.req_ids, sampled, strict=False)
            }
            self._write(sampled=ids)
        return output

    def _write(self, **line: Any) -> None:
        assert self._record is not None
        self._record.write(json.dumps(line) + "\n")
