"""What can go wrong with an answer, and how often it does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tools.faults.origins import Answer, Request

_EXPIRED = (
    b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>'
)
_SHIFT = 7


class Sent(NamedTuple):
    """What is sent of an answer, and how.

    Attributes:
        answer: The answer as it says it is.
        num_bytes: How much of its body is sent before the rest happens; None for all.
        then: ``"reset"`` breaks the connection, ``"close"`` ends it, ``"stall"`` says nothing more, ``"drip"`` sends
            the rest byte by byte, ``""`` is the end of a good answer.
    """

    answer: Answer
    num_bytes: int | None = None
    then: str = ""


Remake = Callable[[Request], Answer]
"""Asks the origin another question."""


def _refused(status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> Callable[..., Sent]:
    return lambda _request, _answer, _remake: Sent(Answer(status, headers or {}, body))


def _cut(then: str, share: float = 0.5) -> Callable[..., Sent]:
    return lambda _request, answer, _remake: Sent(answer, int(len(answer.body) * share), then)


def _asked_again(start: int, end: int, request: Request) -> Request:
    return replace(request, headers={**request.headers, "range": f"bytes={start}-{end - 1}"})


def _short(request: Request, answer: Answer, remake: Remake) -> Sent:
    """Fewer bytes than were asked for, and an answer that says so."""
    if request.range is None or len(answer.body) <= 1:
        return Sent(answer)
    start = request.range[0]
    return Sent(remake(_asked_again(start, start + len(answer.body) // 2, request)))


def _wrong_range(request: Request, answer: Answer, remake: Remake) -> Sent:
    """Other bytes than were asked for, and an answer that says so."""
    if request.range is None or request.range[0] < _SHIFT or not answer.body:
        return Sent(answer)
    start = request.range[0] - _SHIFT
    return Sent(remake(_asked_again(start, start + len(answer.body), request)))


def _lying_range(request: Request, answer: Answer, remake: Remake) -> Sent:
    """Other bytes than were asked for, under the headers of the right ones."""
    return Sent(replace(answer, body=_wrong_range(request, answer, remake).answer.body))


def _whole(request: Request, answer: Answer, remake: Remake) -> Sent:
    """The whole file instead of a range."""
    headers = {name: value for name, value in request.headers.items() if name != "range"}
    return Sent(remake(replace(request, headers=headers)) if request.range else answer)


def _flip(_request: Request, answer: Answer, _remake: Remake) -> Sent:
    """One bit is another one."""
    body = bytearray(answer.body)
    if body:
        body[len(body) // 2] ^= 1
    return Sent(replace(answer, body=bytes(body)))


_KINDS: dict[str, Callable[[Request, Answer, Remake], Sent]] = {
    "429": _refused(429, {"Retry-After": "0"}),
    "500": _refused(500),
    "503": _refused(503),
    "retry-after": _refused(503, {"Retry-After": "1"}),
    "expired": _refused(403, {"Content-Type": "application/xml"}, _EXPIRED),
    "reset": _cut("reset", 0.0),
    "reset-mid-body": _cut("reset"),
    "closed-mid-body": _cut("close"),
    "stall": _cut("stall"),
    "silent": lambda _request, answer, _remake: Sent(answer, -1, "stall"),
    "drip": _cut("drip", 0.0),
    "short": _short,
    "wrong-range": _wrong_range,
    "whole": _whole,
    "lying-range": _lying_range,
    "flip": _flip,
}
PASSING = ("429", "500", "503", "reset", "reset-mid-body", "closed-mid-body", "stall", "short", "wrong-range", "whole")
"""Faults after which the same request may succeed, and that show in the answer itself."""
LYING = ("lying-range", "flip")
"""Wrong bytes in answers that look right: only checksums of the content tell."""


@dataclass
class Faults:
    """Which answers go wrong.

    Attributes:
        share: Part of the requests for data that fail.
        kinds: In which ways, each as often.
        seed: Of the choice.
    """

    share: float = 0.0
    kinds: tuple[str, ...] = PASSING
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = set(self.kinds) - _KINDS.keys()
        if unknown:
            raise ValueError(f"no such faults: {sorted(unknown)}; there are {sorted(_KINDS)}")
        self._random = random.Random(self.seed)

    def choose(self) -> str | None:
        """Returns what goes wrong with the next request; None if nothing does."""
        return self._random.choice(self.kinds) if self._random.random() < self.share else None


def spoiled(kind: str, request: Request, answer: Answer, remake: Remake) -> Sent:
    """Returns what is sent instead of an answer."""
    return _KINDS[kind](request, answer, remake)
