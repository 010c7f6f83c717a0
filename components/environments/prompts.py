"""Which prompts an iteration gets: a seeded permutation of the training rows per epoch, and a cursor into it."""

from __future__ import annotations

import hashlib

import numpy as np

from colchis.components.errors import BadConfig
from colchis.components.records.iteration import Cursor
from colchis.components.records.rows import Rows, Split


def select(rows: Rows, seed: int, cursor: Cursor, n: int) -> tuple[list[int], Cursor]:
    """(row indices, next cursor): the next `n` distinct training prompts.

    An iteration never crosses an epoch: sampling draws and trajectory ids are keyed by (iteration, prompt), so a prompt
    may not come twice in one. When fewer than `n` are left the next epoch begins and the rest of this one is left out;
    each epoch's order is new, so no prompt is left out for good. BadConfig when there are fewer than `n` at all.
    """
    train = rows.indices(Split.TRAIN)
    if n > len(train):
        raise BadConfig(
            f"rollout.prompts: {n} per iteration, but the environment has {len(train)} distinct training prompts",
            hint="lower rollout.prompts or environment.heldout_rows, or make more rows",
        )
    epoch, position = cursor.epoch, cursor.position
    if position + n > len(train):
        epoch, position = epoch + 1, 0
    order = _permutation(len(train), seed, epoch)[position : position + n]
    return [train[i] for i in order], Cursor(epoch=epoch, position=position + n)


def heldout(rows: Rows, n: int) -> list[int]:
    """The first `n` held-out rows (all, when there are fewer): the same ones at every evaluation of a run."""
    return rows.indices(Split.HELDOUT)[:n]


def _permutation(n: int, seed: int, epoch: int) -> list[int]:
    """RandomState, because numpy promises that its stream never changes: a run resumed under another version of numpy
    continues the same permutation."""
    words = np.frombuffer(hashlib.sha256(f"prompts/{seed}/{epoch}".encode()).digest(), dtype="<u4")
    order: list[int] = np.random.RandomState(words).permutation(n).tolist()
    return order
