"""A process of its own that ends a pause when the agent cannot: started by the agent, standard library only.

It reads its orders from standard input, one JSON object a line: {"url": ..., "lease_s": ...} when the agent is about to
pause the engine, {} when the engine continues again. If the lease passes, or the input ends (the agent died) while a
pause is open, it tells the engine to continue. The engine's key, if any, is in the environment.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import urllib.error
import urllib.request

RETRY_S = 0.5
PATIENCE_S = 60.0
"""An engine that cannot be reached for so long after the lease has ended, and its pause with it."""


def resume(url: str) -> bool:
    """Tell the engine to continue; False when it did not answer."""
    keys = [os.environ.get(name, "").strip() for name in ("COLCHIS_ENGINE_ADMIN_KEY", "COLCHIS_ENGINE_KEY")]
    key = keys[0] or keys[1]
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url + "/continue_generation", data=b"{}", headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def end_pause(url: str) -> None:
    """Tell the engine until it answers, for at most PATIENCE_S."""
    print(f"watchdog: the pause of {url} outlived its agent or its lease; the engine continues", file=sys.stderr)
    give_up = time.monotonic() + PATIENCE_S
    while not resume(url) and time.monotonic() < give_up:
        time.sleep(RETRY_S)


def main() -> None:
    """Until standard input ends."""
    url, ends = "", 0.0
    pending = b""
    while True:
        timeout = max(0.0, ends - time.monotonic()) if url else None
        if not select.select([0], [], [], timeout)[0]:
            end_pause(url)
            url = ""
            continue
        data = os.read(0, 65536)
        if not data:
            if url:
                end_pause(url)
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            url, ends = order.get("url", ""), time.monotonic() + order.get("lease_s", 0.0)


if __name__ == "__main__":
    main()
