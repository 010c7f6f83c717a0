"""The one exception family. Each class is an exit code of sysexits(3), and a retry policy with it.

A message names what failed, where, what was expected and found, and the next thing to try:

>>> str(BadData("weights v3: no tensor 'lm_head.weight'", where="runs/a/weights/v00000003", hint="republish v3"))
"weights v3: no tensor 'lm_head.weight' [runs/a/weights/v00000003]; republish v3"
"""

from __future__ import annotations

import errno


class ColchisError(Exception):
    """Base of every error that Colchis raises on purpose. `exit_code` is what the process ends with."""

    exit_code = 70

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what + (f" [{where}]" if where else "") + (f"; {hint}" if hint else ""))

    @property
    def family(self) -> str:
        """Name of the class below, as answers and metrics call it; that of its base for a narrower one."""
        return next(c.__name__ for c in type(self).__mro__ if ColchisError in c.__bases__)


class BadConfig(ColchisError):
    """The configuration (of the run, the store or the environment) cannot work as it is (EX_CONFIG)."""

    exit_code = 78


class BadData(ColchisError):
    """An object is missing, corrupt or contradicts another: a refusal, never worth a retry (EX_DATAERR)."""

    exit_code = 65


class PeerUnavailable(ColchisError):
    """A peer (store, engine, agent) did not answer before its deadline (EX_UNAVAILABLE)."""

    exit_code = 69


class Temporary(ColchisError):
    """Failed, but the same command may work in a moment: the retry policy runs it again (EX_TEMPFAIL)."""

    exit_code = 75


class Bug(ColchisError):
    """An invariant of Colchis itself does not hold (EX_SOFTWARE)."""

    exit_code = 70


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_THAT = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP)


def refused_by_system(error: OSError, folder: str) -> BadConfig | None:
    """What a full disk (or quota, or file size limit), a lack of rights or a path that leads elsewhere means, by a process
    that writes below `folder`; None for any other error of the system, which may be a bug of ours."""
    if error.errno in _NO_ROOM:
        hint = "give its file system more room, then run the same command again"
    elif error.errno in _NOT_ALLOWED and error.filename:
        hint = "name a place that this user may write, or change its rights"
    elif error.errno in _NOT_THAT and error.filename:
        hint = "name another file or folder"
    else:
        return None
    what = "cannot write" if error.errno in _NO_ROOM else "cannot use it"
    return BadConfig(f"{what}: {error.strerror}", where=str(error.filename or folder), hint=hint)
