"""Ends a process whose event loop stands still, which no deadline inside that loop can."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def bounded(limit_s: float) -> AsyncIterator[None]:
    """End the process with code 1 when its event loop does not run for `limit_s`, after writing to stderr where every
    thread stands. The clock is a thread of C: a user's native code that holds the interpreter's lock cannot stop it."""

    def wind() -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or 2)

    async def keep_wound() -> None:
        while True:
            await asyncio.sleep(limit_s / 4)
            wind()

    wind()
    winding = asyncio.create_task(keep_wound())
    try:
        yield
    finally:
        winding.cancel()
        faulthandler.cancel_dump_traceback_later()
