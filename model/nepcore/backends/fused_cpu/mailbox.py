"""How the threads of a crew are woken, find their job, and leave it again; none of this needs the interpreter.

A helper sleeps in compiled code. It is called when an evaluation begins, and looks out for the job while the caller
prepares it. A mailbox is a row of ``MAILBOX`` words; all of them are one array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .inner import inner
from .kernels import attend
from .signals import SEMAPHORE_WORDS, exchange, fetch_add, relax, replace, sleep_on, wake
from .words import address_of, at_address, first_of

if TYPE_CHECKING:
    from .model import Widths
    from .words import Ints

_JOB, _SERIAL, _INSIDE, _STATE, _QUIT = (SEMAPHORE_WORDS + k for k in range(5))

MAILBOX = 2 * SEMAPHORE_WORDS
"""Words of a mailbox: a semaphore; address of the job, 0 if there is none; how many there were; whether the helper is
at it; what the helper does; whether it shall end."""

_ASLEEP, _CALLED, _AWAKE = 0, 1, 2

_LOOKS = 10_000
"""Looks for a job before going back to sleep: some hundred microseconds."""

_FAREWELL = 1_000
"""Looks at whether a helper has left a job in which nothing is left to do."""


@inner
def work(mails: Ints, job: Ints, hand: int, like: Any, widths: Widths, sleeps: bool) -> None:
    """Do the caller's part of a job (``hand`` 0), or be a helper (see :func:`serve`; ``job`` is not looked at)."""
    if hand == 0:
        attend(first_of(job), 0, like, widths)
    else:
        serve(mails, hand, like, widths, sleeps)


@inner
def serve(mails: Ints, hand: int, like: Any, widths: Widths, sleeps: bool) -> None:
    """Do the jobs that come into the mailbox of a helper, until it shall end.

    Args:
        mails: All mailboxes.
        hand: Which helper this is, from 1.
        like: An array of the compute dtype.
        widths: Vector widths.
        sleeps: Whether to sleep here; else this returns where it would, and is called again.
    """
    mail = at_address(address_of(mails) + 8 * MAILBOX * (hand - 1), mails)
    while True:
        if sleeps:
            sleep_on(mail, 0)
        exchange(mail, _STATE, _AWAKE)
        while True:
            seen = fetch_add(mail, _SERIAL, 0)
            for _ in range(_LOOKS):
                if fetch_add(mail, _QUIT, 0) != 0:
                    return
                if fetch_add(mail, _JOB, 0) != 0:
                    # Who hands out jobs waits for those inside before it throws one away.
                    fetch_add(mail, _INSIDE, 1)
                    seen = fetch_add(mail, _SERIAL, 0)
                    job = fetch_add(mail, _JOB, 0)
                    if job != 0:
                        attend(at_address(job, mail), hand, like, widths)
                    fetch_add(mail, _INSIDE, -1)
                    break
                relax()
            exchange(mail, _STATE, _ASLEEP)
            # One that came in the meantime was not announced. If that has changed, the call will be heard.
            if fetch_add(mail, _SERIAL, 0) == seen or not replace(mail, _STATE, _ASLEEP, _AWAKE):
                break
        if not sleeps:
            return


@inner
def call(mails: Ints, hands: int, sleeps: bool) -> int:
    """Wake helpers 1 to ``hands`` − 1; how many slept, which a caller must wake where they do not sleep in here."""
    first = first_of(mails)
    n = 0
    for hand in range(1, hands):
        at = (hand - 1) * MAILBOX
        if replace(first, at + _STATE, _ASLEEP, _CALLED):
            n += 1
            if sleeps:
                wake(first, at)
    return n


@inner
def hand_out(mails: Ints, hands: int, job: Ints, sleeps: bool) -> int:
    """Put a job into the mailboxes of helpers 1 to ``hands`` − 1 and :func:`call` them."""
    first = first_of(mails)
    for hand in range(1, hands):
        at = (hand - 1) * MAILBOX
        fetch_add(first, at + _SERIAL, 1)
        exchange(first, at + _JOB, address_of(job))
    return call(mails, hands, sleeps)


@inner
def withdraw(mails: Ints, hands: int) -> bool:
    """Take the job out of the mailboxes; whether no helper is at it any longer."""
    first = first_of(mails)
    for hand in range(1, hands):
        exchange(first, (hand - 1) * MAILBOX + _JOB, 0)
    for hand in range(1, hands):
        at = (hand - 1) * MAILBOX + _INSIDE
        for _ in range(_FAREWELL):
            if fetch_add(first, at, 0) == 0:
                break
            relax()
        if fetch_add(first, at, 0) != 0:
            return False
    return True


@inner
def dismiss(mails: Ints, hands: int) -> None:
    """Let helpers 1 to ``hands`` − 1 end."""
    first = first_of(mails)
    for hand in range(1, hands):
        at = (hand - 1) * MAILBOX
        exchange(first, at + _QUIT, 1)
        wake(first, at)
