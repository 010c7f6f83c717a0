"""An engine that serves nothing gets what its run declares, instead of standing idle until the next reload."""

from __future__ import annotations

import logging
import threading

from colchis.components.agent.agent import Agent
from colchis.components.errors import ColchisError

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""An engine that is restarted tells nobody: it has to be looked at."""
LONGEST_WAIT_S = 60.0
JOIN_S = 8.0


class Refill:
    """A thread that looks at the engine until the agent stops, and waits longer after each refill that failed."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._thread = threading.Thread(target=self._run, name="refill", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """After the agent was told to stop; a refill under way gives up at its next step."""
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        wait_s = LOOK_S
        while not self._agent.stopping.wait(wait_s):
            try:
                self._agent.refill()
                wait_s = LOOK_S
            except (ColchisError, OSError) as error:  # a full disk passes, too; this thread must not end by it
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                log.warning("the engine is not filled yet, next try in %g s: %s", wait_s, error)
