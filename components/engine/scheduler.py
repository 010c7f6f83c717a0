"""The scheduler: one thread that admits samples, steps the decoder, and runs every change of weights or pause state.

The HTTP side never touches its state: it posts closures (`post`) that run between two steps, and receives finished
samples and stream pieces in batches through `deliver`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import torch

from colchis.components.engine.advance import Piece, abort_reason, advance, extra_logprobs
from colchis.components.engine.decoder import Decoder, Prefix
from colchis.components.engine.metrics import Counters
from colchis.components.engine.prefixes import Key, PrefixCache
from colchis.components.engine.sample import Rows, Sample
from colchis.components.engine.settings import EngineSettings
from colchis.components.errors import BadData, PeerUnavailable

T = TypeVar("T")
log = logging.getLogger(__name__)

PREFILL_TOKENS = 4096
"""Padded prompt tokens computed in one forward pass."""


class PauseMode(StrEnum):
    """What happens to running samples: end them, put them back in the queue with their tokens, or freeze them."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


@dataclass(frozen=True)
class Barrier:
    """A closure that waits until the samples submitted before it are done (or the engine is paused)."""

    order: int
    run: Callable[[], object]
    future: Future[Any]


class Scheduler:
    """Owns the decoder, the rows and the queue. Public methods are safe from any thread unless they say otherwise."""

    def __init__(
        self,
        settings: EngineSettings,
        counters: Counters,
        deliver: Callable[[list[Sample], list[Piece]], None],
        stop_string: Callable[[Sample, list[int]], str | None],
        crashed: Callable[[], None],
    ) -> None:
        self.settings, self.counters = settings, counters
        self._deliver, self._stop_string, self._crashed = deliver, stop_string, crashed
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._replays = settings.deterministic
        self._rows = Rows(settings.max_running_requests)
        self._waiting: deque[Sample] = deque()
        self._barriers: deque[Barrier] = deque()
        self._prefixes = PrefixCache(settings.prefix_cache_tokens)
        self._finished: list[Sample] = []
        self._pieces: list[Piece] = []
        self._submitted = 0
        self._stopping = False
        self.decoder: Decoder | None = None
        self.weight_version = settings.weight_version
        self.paused: PauseMode | None = None
        self.alive = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # --- from the HTTP side -------------------------------------------------------------------------------------

    def start(self) -> None:
        self.alive = True
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread between two steps."""
        self.post(lambda: setattr(self, "_stopping", True))
        self._thread.join(timeout_s)

    def post(self, closure: Callable[[], None]) -> None:
        """Runs a closure in the scheduler's thread, between two steps."""
        with self._wake:
            self._inbox.append(closure)
            self._wake.notify()

    def call(self, closure: Callable[[], T]) -> Future[T]:
        """Like `post`, with the closure's result or exception as a future."""
        future: Future[T] = Future()
        self.post(lambda: _settle(future, closure))
        return future

    def call_when_idle(self, closure: Callable[[], T]) -> Future[T]:
        """Runs a closure once everything submitted before it is done, or at once when paused. Later samples wait."""
        future: Future[T] = Future()

        def enqueue() -> None:
            self._barriers.append(Barrier(self._submitted, closure, future))

        self.post(enqueue)
        return future

    def submit(self, samples: list[Sample]) -> None:
        def enqueue() -> None:
            for sample in samples:
                sample.order = self._submitted
                self._waiting.append(sample)
            self._submitted += 1

        self.post(enqueue)

    # --- in the scheduler's thread (through post, call, call_when_idle) ------------------------------------------

    @property
    def running(self) -> int:
        return self._rows.count

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def pause(self, mode: PauseMode) -> int:
        """Stops stepping; returns how many samples it aborted, retracted or froze."""
        running = self._rows.count
        if mode is PauseMode.ABORT:
            running = self.abort_all("paused with mode abort")
        elif mode is PauseMode.RETRACT:
            self._retract_all()
        self.paused = mode
        return running

    def resume(self) -> None:
        self.paused = None

    def abort_all(self, message: str) -> int:
        """Ends every sample with what it has; returns how many."""
        return self.abort(lambda sample: True, message)

    def abort(self, wanted: Callable[[Sample], bool], message: str) -> int:
        """Ends the samples that `wanted` names, running or queued."""
        reason = abort_reason(message)
        count = 0
        for row in range(self._rows.count - 1, -1, -1):
            if wanted(self._rows.samples[row]):
                self._end_row(row, reason)
                count += 1
        kept: deque[Sample] = deque()
        for sample in self._waiting:
            if wanted(sample):
                self._end(sample, reason)
                count += 1
            else:
                kept.append(sample)
        self._waiting = kept
        self.counters.aborted.inc(count)
        return count

    def flush(self) -> bool:
        """Drops every cached key and value; False when samples are running, whose keys those are."""
        if self._rows.count:
            return False
        self._prefixes.clear()
        if self.decoder is not None:
            self.decoder.reset()
        return True

    def install(self, decoder: Decoder, swap: Callable[[], None] | None, version: str | None, *, flush: bool) -> None:
        """Makes new weights the ones that serve. Cached prompts always go: they belong to the old weights."""
        if flush and self._rows.count:
            raise BadData(
                f"flush_cache is true but {self._rows.count} samples are frozen in place with their keys and values",
                hint="pause with mode retract, or send flush_cache false to go on with the old keys and values",
            )
        if swap is not None:
            swap()
        self.decoder = decoder
        self._prefixes.clear()
        if flush:
            decoder.reset()
        if version is not None:
            self.set_version(version)

    def set_version(self, version: str) -> None:
        self.weight_version = version
        for row in range(self._rows.count):
            self._rows.samples[row].note_version(version, self._rows.kept(row))

    # --- the loop ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                torch.set_num_threads(self.settings.threads)
                while not self._stopping:
                    self._turn()
        except BaseException:
            log.exception("the scheduler ended on an error of its own; the engine exits")
            raise
        finally:
            self.alive = False
            if not self._stopping:
                self._crashed()

    def _turn(self) -> None:
        with self._wake:
            while not (self._inbox or self._busy()):
                self._wake.wait()
            inbox = list(self._inbox)
            self._inbox.clear()
        for closure in inbox:
            closure()
        self._pass_barriers()
        if self.paused is None:
            self._admit()
            if self._rows.count:
                self._step()
        if self._finished or self._pieces:
            finished, pieces, self._finished, self._pieces = self._finished, self._pieces, [], []
            self._deliver(finished, pieces)
        self.counters.running.set(self._rows.count)
        self.counters.queued.set(len(self._waiting))

    def _busy(self) -> bool:
        """Whether a turn would do something without a new message."""
        if self.paused is not None:
            return bool(self._barriers)
        return bool(self._rows.count or self._waiting or self._barriers)

    def _live(self) -> Iterator[Sample]:
        yield from self._rows.samples
        yield from self._waiting

    def _pass_barriers(self) -> None:
        while self._barriers:
            barrier = self._barriers[0]
            if self.paused is None and any(sample.order < barrier.order for sample in self._live()):
                return
            self._barriers.popleft()
            _settle(barrier.future, barrier.run)

    def _end(self, sample: Sample, reason: dict[str, Any]) -> None:
        if not sample.spans:
            sample.note_version(self.weight_version, 0)
        sample.finish(reason)
        self._finished.append(sample)

    def _end_row(self, row: int, reason: dict[str, Any]) -> None:
        self._end(self._rows.collect(row), reason)
        self._free(row)

    def _free(self, row: int) -> None:
        moved = self._rows.remove(row)
        if moved is not None:
            assert self.decoder is not None
            self.decoder.move(moved, row, int(self._rows.position[row]) + 1)

    def _retract_all(self) -> None:
        """Puts running samples back at the head of the queue, oldest first, with their tokens."""
        samples = [self._rows.collect(row) for row in range(self._rows.count)]
        for sample in sorted(samples, key=lambda sample: sample.order, reverse=True):
            sample.retractions += 1
            self._waiting.appendleft(sample)
        while self._rows.count:
            self._rows.remove(self._rows.count - 1)
        self.counters.retracted.inc(len(samples))

    def _fits(self, count: int, tokens: int) -> bool:
        """Whether `count` rows of `tokens` positions stay inside the cache budget."""
        return count <= self._rows.capacity and count * tokens <= self.settings.max_total_tokens

    def _key(self, sample: Sample) -> Key:
        """What is computed at once before a sample's next token.

        A retracted sample's own tokens belong to it; in deterministic mode they are replayed one by one instead, since
        a prefill and a step may round differently.
        """
        ids = tuple(sample.prompt) if self._replays else (*sample.prompt, *sample.output_ids)
        return sample.namespace, ids

    def _admissible(self) -> list[Sample]:
        """Takes from the queue, in order, what rows and cache can hold now."""
        limit = self._barriers[0].order if self._barriers else None
        tokens = int(self._rows.needed[: self._rows.count].max()) if self._rows.count else 0
        taken: list[Sample] = []
        while self._waiting:
            sample = self._waiting[0]
            tokens = max(tokens, sample.needed_tokens)
            if (limit is not None and sample.order >= limit) or not self._fits(
                self._rows.count + len(taken) + 1, tokens
            ):
                break
            taken.append(self._waiting.popleft())
        return taken

    def _admit(self) -> None:
        decoder = self.decoder
        if decoder is None:
            for sample in list(self._waiting):
                self._end(sample, abort_reason("no model is loaded", 503))
            self._waiting.clear()
            return
        samples = self._admissible()
        if not samples:
            return
        prefixes = self._prefill(decoder, samples)
        # Samples of one prompt take neighbouring rows, so that their prompt is copied in one go.
        first = self._rows.count
        decoder.reserve(first + len(samples), max(sample.needed_tokens for sample in samples))
        placed: list[torch.Tensor] = []
        groups: dict[Key, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(self._key(sample), []).append(sample)
        for key, group in groups.items():
            prefix = prefixes[key]
            vocab = decoder.architecture.vocab
            drawn = [sample for sample in group if sample.params.max_new_tokens]
            rows = [self._rows.add(sample, vocab, replays=self._replays) for sample in drawn]
            for sample in group:
                sample.note_version(self.weight_version, len(sample.output_ids))
                if not sample.params.max_new_tokens:
                    self._end(sample, {"type": "length", "length": 0})
            if rows:
                decoder.place(rows[0], len(rows), prefix)
                placed.append(prefix.logits.expand(len(rows), -1))
        if placed:
            self._draw(slice(first, self._rows.count), torch.cat(placed))

    def _prefill(self, decoder: Decoder, samples: list[Sample]) -> dict[Key, Prefix]:
        """The computed prompt (and earlier output) of every sample; each distinct one is computed once."""
        found: dict[Key, Prefix] = {}
        missing: dict[Key, None] = {}
        for sample in samples:
            key = self._key(sample)
            fresh = not sample.admitted
            sample.admitted = True
            if fresh and sample.logprob_start >= 0:
                self._score_prompt(decoder, sample)
            kept = None if key in found else self._prefixes.get(key)
            if kept is not None:
                found[key] = kept
            hit = key in found or key in missing
            if not hit:
                missing[key] = None
            if fresh:
                sample.cached_tokens = len(sample.prompt) if hit else 0
                self.counters.prompt_tokens.inc(len(sample.prompt))
                self.counters.cached_tokens.inc(sample.cached_tokens)
        pending = sorted(missing, key=lambda key: len(key[1]))
        while pending:
            batch = [pending.pop()]
            while pending and (len(batch) + 1) * len(batch[0][1]) <= PREFILL_TOKENS:
                batch.append(pending.pop())
            for key, prefix in zip(batch, decoder.prefill([ids for _, ids in batch]), strict=True):
                found[key] = prefix
                self._prefixes.put(key, prefix)
        return found

    def _score_prompt(self, decoder: Decoder, sample: Sample) -> None:
        """Log-probs (at temperature 1, as SGLang's) of the prompt tokens after position `logprob_start`."""
        start = sample.logprob_start
        logprobs = decoder.prompt_logits(sample.prompt, start)[:-1].log_softmax(-1)
        targets = torch.tensor(sample.prompt[start + 1 :], dtype=torch.int64)
        sample.input_logprobs = logprobs.gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
        for row in logprobs if sample.top_logprobs or sample.token_ids_logprob else ():
            top, chosen = extra_logprobs(row, sample)
            sample.input_top.append(top)
            sample.input_chosen.append(chosen)

    def _step(self) -> None:
        assert self.decoder is not None
        rows, n = self._rows, self._rows.count
        window = int(rows.position[:n].max()) + 1
        logits = self.decoder.step(rows.torch_token[:n], rows.torch_position[:n], window)
        self._draw(slice(0, n), logits)

    def _draw(self, part: slice, logits: torch.Tensor) -> None:
        """Advances the rows in `part` by one token and frees those that are done."""
        fresh = self._rows.produced[part] >= self._rows.replay[part]
        self.counters.generation_tokens.inc(int(fresh.sum()))
        reasons, pieces = advance(self._rows, part, logits, self._stop_string)
        self._pieces += pieces
        # From the last row down: freeing a row moves the last one, which has then been looked at already.
        for row in sorted(reasons, reverse=True):
            if reasons[row]["type"] == "abort" and self.decoder is not None:
                self.decoder.clear(row)
            self._end_row(row, reasons[row])


def _settle(future: Future[T], closure: Callable[[], T]) -> None:
    """Runs a closure into a future; a future that its caller gave up (deadline, disconnect) is skipped."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(closure())
    except (BadData, PeerUnavailable) as error:
        future.set_exception(error)
