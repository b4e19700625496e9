"""Answers of the API: whoever asks has to take them in time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

STUCK_S = 30.0  # that one may take for an answer, or for one event of a stream
LEAST_RATE = 4096  # bytes a second of a long one


class Answer(web.Response):
    """One that whoever asked has to take in time: aiohttp would wait for ever."""

    async def prepare(self, request: web.BaseRequest) -> Any:
        """See :meth:`aiohttp.web.StreamResponse.prepare`."""
        self._link = request.transport
        return await super().prepare(request)

    async def write_eof(self, data: bytes = b"") -> None:
        """See :meth:`aiohttp.web.StreamResponse.write_eof`."""
        length = len(self.body) if isinstance(self.body, bytes) else 0
        try:
            async with asyncio.timeout(max(STUCK_S, length / LEAST_RATE)):
                await super().write_eof(data)
        except TimeoutError as error:
            if self._link is not None:
                self._link.abort()
            raise ConnectionResetError("the answer is not taken") from error


def json_response(value: Any, status: int = 200) -> Answer:
    """An answer of the API."""
    body = encoded(value)
    return Answer(body=body, status=status, content_type="application/json", charset="utf-8")


def encoded(value: Any) -> bytes:
    """A value as JSON. Names of files may hold what is no UTF-8 (PEP 383): there is a ``?``."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")
