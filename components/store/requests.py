"""How one request to the store is made: what is worth repeating, for how long, and what each refusal means.

botocore's own retries are off: it gives up by count where we give up by time, and it hides that a reply was lost.
"""

from __future__ import annotations

import functools
import logging
import ssl
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3.session
import urllib3.exceptions
from botocore.awsrequest import AWSPreparedRequest
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
    SSLError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError
from tenacity import (
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_before_delay,
    stop_when_event_set,
    wait_random_exponential,
)

from colchis.components.errors import BadConfig, PeerUnavailable
from colchis.components.store.settings import StoreSettings

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0
"""Longest silence on an open connection, in either direction; a slow transfer that moves is not cut."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
CONNECTIONS = 32
SMALL_BODY_BYTES = 128 << 10
"""A server that refuses without reading a body of this size still gets its answer through to us."""

_ABSENT = {"NoSuchKey", "NotFound", "404"}
_LOST = {"PreconditionFailed", "412"}
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}
_TRANSIENT = {
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_NETWORK = (
    BotoConnectionError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ResponseParserError,
    ResponseStreamingError,
    TimeoutError,
    ssl.SSLError,
    urllib3.exceptions.HTTPError,
)


class Absent(Exception):
    """There is no such object."""


class Lost(Exception):
    """A condition (If-None-Match, If-Match) did not hold."""


class NoUpload(Exception):
    """The store does not know this multipart upload: completed, aborted or forgotten."""


class OutOfRange(Exception):
    """The object ends before the range that was asked for."""


class _Again(Exception):
    """Worth another try inside the deadline; the cause is chained."""


class Requests:
    """One client, one policy. Thread-safe; make it after a fork, not before."""

    def __init__(self, settings: StoreSettings, deadline_s: float) -> None:
        self.settings, self.deadline_s = settings, deadline_s
        self.client: Any = _client(settings, deadline_s)

    def call(
        self,
        what: str,
        key: str,
        operation: Callable[[], Result],
        *,
        deadline_s: float | None = None,
        cancel: threading.Event | None = None,
    ) -> Result:
        """The result of `operation`, tried with full jitter until `deadline_s` has passed since the first try, or
        until `cancel` is set by a caller that no longer wants it.

        Raises Absent, Lost, NoUpload for the caller to interpret; PeerUnavailable past the deadline, with the last
        error; BadConfig at once for what no repetition can cure (credentials, bucket, unsupported request).
        """
        where = f"{self.settings.bucket}/{key}"
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        cancel = cancel or threading.Event()

        def attempt() -> Result:
            try:
                return operation()
            except (ClientError, BotoCoreError, *_NETWORK) as error:
                raise self._meaning(error, what, where) from error

        def note(state: RetryCallState) -> None:
            pause_s = state.next_action.sleep if state.next_action else 0.0
            log.warning("store: %s %s: %s; again in %.2f s", what, where, _last_error(state), pause_s)

        retrying = Retrying(
            retry=retry_if_exception_type(_Again),
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            stop=stop_before_delay(deadline_s) | stop_when_event_set(cancel),
            sleep=sleep_using_event(cancel),
            before_sleep=note,
        )
        try:
            return retrying(attempt)
        except RetryError as error:
            last = error.last_attempt
            cause = last.exception()
            raise PeerUnavailable(
                f"object store {self.settings.endpoint}: no {what} within {deadline_s:g} s "
                f"(tried {last.attempt_number} times); last error: {cause}",
                where=where,
                hint="check that the store is up and reachable from here, then run the same command again",
            ) from (cause.__cause__ if cause else None)

    def _meaning(self, error: Exception, what: str, where: str) -> Exception:
        if isinstance(error, ClientError):
            return self._refusal(error, what, where)
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, SSLError | ssl.SSLError) and "CERTIFICATE_VERIFY_FAILED" in text:
            return BadConfig(
                f"object store {self.settings.endpoint}: its certificate is not trusted ({error})",
                where=where,
                hint="set AWS_CA_BUNDLE to the certificate authority of the store",
            )
        if isinstance(error, _NETWORK):
            return _Again(text)
        return BadConfig(f"object store {self.settings.endpoint}: cannot {what}: {text}", where=where)

    def _refusal(self, error: ClientError, what: str, where: str) -> Exception:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        text = f"{status} {code}: {error.response.get('Error', {}).get('Message', '')}"
        if code == "NoSuchBucket":
            return BadConfig(
                f"object store {self.settings.endpoint}: no bucket '{self.settings.bucket}'",
                where=where,
                hint="create it, or correct COLCHIS_S3_BUCKET",
            )
        if code == "NoSuchUpload":
            return NoUpload(text)
        if code == "InvalidRange" or status == 416:
            return OutOfRange(text)
        if code in _LOST or status == 412:
            return Lost(text)
        if code in _ABSENT or status == 404:
            return Absent(text)
        if code in _CONFLICT or code in _TRANSIENT or status in (408, 409, 429) or (status >= 500 and status != 501):
            return _Again(text)
        hint = "check COLCHIS_S3_ENDPOINT, COLCHIS_S3_REGION and what the store supports"
        if code == "RequestTimeTooSkewed":
            hint = "set the clock of this machine: signatures carry the time"
        elif status in (401, 403):
            hint = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what they may do in this bucket"
        return BadConfig(f"object store {self.settings.endpoint} refused to {what}: {text}", where=where, hint=hint)


def _last_error(state: RetryCallState) -> str:
    return str(state.outcome.exception()) if state.outcome else ""


@functools.cache
def _session() -> Any:
    """One for the process: it keeps the parsed description of S3, which takes longer to read than a request."""
    return boto3.session.Session()


def preload() -> None:
    """Read the description of S3 now, for processes that are forked later. Opens no connection."""
    _client(StoreSettings("http://127.0.0.1:1", "none", "none", "none"), 1.0)


def _client(settings: StoreSettings, deadline_s: float) -> Any:
    host = urlsplit(settings.endpoint).hostname
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": settings.addressing},
        request_checksum_calculation=settings.checksums,
        response_checksum_validation=settings.checksums,
        connect_timeout=min(CONNECT_TIMEOUT_S, deadline_s),
        read_timeout=min(READ_TIMEOUT_S, deadline_s),
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        # A proxy of the environment cannot reach our own loopback; elsewhere it may be the only way out.
        proxies={} if host in ("127.0.0.1", "localhost", "::1") else None,
    )
    client = _session().client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region,
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        aws_session_token=settings.session_token or None,
        config=config,
    )
    client.meta.events.register("before-send.s3", _send_small_bodies_at_once)
    return client


def _send_small_bodies_at_once(request: AWSPreparedRequest, **_: object) -> None:
    """Drop `Expect: 100-continue` where it saves nothing: asking first doubles the time of a small write, and when many
    write at once (a race for a commit) some wait the whole second that botocore gives the server to say so.
    """
    if int(request.headers.get("Content-Length") or 0) <= SMALL_BODY_BYTES:
        request.headers.pop("Expect", None)
