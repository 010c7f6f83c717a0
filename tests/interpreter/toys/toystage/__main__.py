"""`python -m toystage WHAT [ARGS]`: one way for a command to behave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def main(argv: list[str] | None = None) -> int | None:
    what, *rest = sys.argv[1:] if argv is None else argv
    match what:
        case "show":
            seen = {
                "rest": rest,
                "directory": os.getcwd(),
                "environment": dict(os.environ),
                "leader": os.getsid(0) == os.getpid(),
                "stdin": sys.stdin.read(),
            }
            print(json.dumps(seen))
            print("to stderr", file=sys.stderr)
        case "return":
            return int(rest[0])
        case "none":
            return None
        case "exit":
            sys.exit(int(rest[0]))
        case "exit-text":
            sys.exit("a reason")
        case "raise":
            raise RuntimeError("on purpose")
        case "signal":
            os.kill(os.getpid(), int(rest[0]))
        case "sleep":
            print("sleeping", flush=True)
            time.sleep(float(rest[0]))
        case "trap":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(rest[0])))
            Path("ready").touch()
            stay()
        case "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path("ready").touch()
            stay()
        case "descend":
            descend(rest[0])
        case "unflushed":
            sys.stdout.write("no newline")
        case "thread":
            threading.Thread(target=lambda: (time.sleep(0.2), print("from a thread"))).start()
        case "modules":
            print(json.dumps(sorted(set(rest) & set(sys.modules))))
        case "threads":
            print(json.dumps([len(os.listdir("/proc/self/task")), os.environ.get("OMP_NUM_THREADS")]))
    return 0


def stay() -> None:
    """For a minute, in short sleeps: a signal just before a long one would only be handled after it."""
    for _ in range(1200):
        time.sleep(0.05)


def descend(how: str) -> None:
    """Starts a child of its own, in its group or in a session of its own, writes its pid down, and ends or stays."""
    child = subprocess.Popen(["sleep", "60"], start_new_session="session" in how)
    Path("pid").write_text(str(child.pid))
    if "stay" in how:
        Path("ready").touch()
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(main())
