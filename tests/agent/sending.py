"""A sender as a process of its own, so that a test can kill it: `python -m tests.agent.sending MANIFEST FOLDER URL BYTES`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from colchis.components.records.weights import WeightsManifest
from colchis.components.weights.protocol import Offer
from tests.agent.conftest import DEADLINE_S

SMALL_BYTES = 64 << 10
"""Of a bucket: the model of the tests needs several."""


class SenderProcess:
    """Waits for the engine of the agent at `towards`, with the files of `folder`."""

    def __init__(self, manifest: WeightsManifest, folder: Path, towards: str, scratch: Path) -> None:
        path = scratch / "manifest.json"
        path.write_bytes(manifest.to_bytes())
        argv = [sys.executable, "-m", "tests.agent.sending", str(path), str(folder), towards, str(SMALL_BYTES)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.offer = Offer.model_validate_json(self.process.stdout.readline())

    def stop(self) -> None:
        """It is there, and does nothing from now on."""
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def main(manifest: str, folder: str, towards: str, bucket_bytes: str) -> None:
    from colchis.components.direct.sender import Sender

    sender = Sender(
        WeightsManifest.from_bytes(Path(manifest).read_bytes(), manifest),
        Path(folder),
        backend="gloo",
        bucket_bytes=int(bucket_bytes),
    )
    print(sender.offer(1, towards=towards, timeout_s=DEADLINE_S).model_dump_json(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
