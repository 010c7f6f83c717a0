"""A grader that does what the trajectory's text tells it to: every way in which a grader can go wrong."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np

from colchis.components.grader import NoScore, Score
from colchis.components.records.verdicts import Reason


class Hostile:
    def __init__(self, start: str = "") -> None:
        if start == "exit":
            os._exit(7)
        if start == "raise":
            raise RuntimeError("no licence")

    def grade(self, trajectory, row):
        action, _, argument = trajectory.completion.partition(":")
        return getattr(self, action)(argument)

    def number(self, argument):
        values = {
            "int": 2,
            "bool": True,
            "numpy": np.float32(0.5),
            "numpy bool": np.bool_(True),
            "fraction": Fraction(1, 4),
            "text": "1.0",
            "none": None,
            "complex": 1j,
            "list": [1.0],
            "decimal": Decimal("1"),
            "nan": float("nan"),
            "inf": float("-inf"),
            "numpy nan": np.float64("nan"),
            "huge": 10**400,
            "nan in score": Score(float("nan")),
            "none in score": Score(None),
            "remark": Score(0.5, "two\nlines \ud800", cost=0.25),
        }
        return values[argument]

    def fail(self, argument):
        raise ValueError(argument + "\nsecond line \udcff")

    def no_score(self, argument):
        raise NoScore(Reason.RATE_LIMITED, argument)

    def exit(self, argument):
        sys.exit(3)

    def vanish(self, argument):
        os._exit(9)

    def segfault(self, argument):
        ctypes.string_at(0)

    def native_hang(self, argument):
        """In C, with the interpreter locked and signals ignored: nothing inside the process can end it."""
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(600)

    def sleep(self, argument):
        time.sleep(float(argument))
        return 1.0

    def children(self, argument):
        """Leaves its process id and those of two children, one of which holds every open end of ours."""
        child = subprocess.Popen(["sleep", "600"], close_fds=False)
        forked = os.fork()
        if forked == 0:
            time.sleep(600)
            os._exit(0)
        Path(argument).write_text(f"{os.getpid()} {child.pid} {forked}")
        time.sleep(600)

    def die_with_children(self, argument):
        """Dies itself, while a child goes on and keeps the connection open."""
        child = subprocess.Popen(["sleep", "600"], close_fds=False)
        Path(argument).write_text(f"{child.pid}")
        os._exit(4)

    def print_score(self, argument):
        """What a program under test may print to look like a verdict."""
        line = '{"score": 1.0, "detail": "", "cost": 0}\n'
        for descriptor in (1, 2):
            os.write(descriptor, line.encode())
        return 0.0

    def thread(self, argument):
        box = []
        worker = threading.Thread(target=lambda: box.append(0.75))
        worker.start()
        worker.join()
        return box[0]

    def alarm(self, argument):
        """Libraries such as math-verify bound themselves by SIGALRM, which works only in a main thread."""

        def expired(*_):
            raise TimeoutError

        signal.signal(signal.SIGALRM, expired)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(10)
        except TimeoutError:
            return 0.25
        return 1.0

    def sentence(self, argument):
        """A worker keeps its state between tasks."""
        self.count = getattr(self, "count", 0) + 1
        return float(self.count)
