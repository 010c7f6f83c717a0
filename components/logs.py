"""One line per event: JSON in a pod, plain text on a terminal."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix("colchis.components."),
            "event": record.getMessage(),
        }
        event.update(getattr(record, "fields", {}))
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{k}={v}" for k, v in getattr(record, "fields", {}).items())
        text = f"{record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def set_up(level: int = logging.INFO) -> None:
    """Send all log lines of the process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_TextFormatter() if sys.stderr.isatty() else _JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "botocore", "boto3", "urllib3", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def event(logger: logging.Logger, message: str, **fields: object) -> None:
    """Log `message` with fields that stay machine-readable."""
    logger.info(message, extra={"fields": fields})
