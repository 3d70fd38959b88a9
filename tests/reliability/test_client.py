"""The traffic's own client reads events as the server meant them."""

import asyncio
import json
from collections.abc import AsyncIterator

import client
import httpx


def test_events_may_hold_any_character() -> None:
    """U+0085, U+2028 and others end a line for Python and httpx, not for JSON; and pieces of the stream end anywhere."""
    sent = [{"text": "a\u0085b\u2028c\x0bd\x1ce"}, {"text": "é漢😀" * 20}, {"text": "two\n\nlines"}]
    body = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in sent).encode() + b"data: [DONE]\n\n"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 3):
            yield body[start : start + 3]

    async def received() -> list[dict]:
        response = httpx.Response(200, content=pieces(), headers={"Content-Type": "text/event-stream; charset=utf-8"})
        return [event async for event in client._events(response)]

    assert asyncio.run(received()) == sent
