"""A fault that passes, and limits that do not depend on how busy this machine is."""

from __future__ import annotations

from shardstream.storage import _reads, _systems
from tools.faults import Faults

HANGING = ("stall", "silent", "drip")
"""Answers whose end never comes: only the limit of an attempt does."""


def wait_for_answers(monkeypatch):
    """An attempt waits for an answer that comes late, also when the deadline of all attempts is over."""
    monkeypatch.setattr(_systems, "_LEAST_ATTEMPT_S", 30.0)


def soon_try_again(monkeypatch):
    """An attempt that hangs is over soon, but not before a busy machine has answered; as many as it takes follow."""
    monkeypatch.setattr(_reads, "OF_ONE_REQUEST", 3 / _systems.RETRY_TIMEOUT_S)


class Once(Faults):
    """The first request for data goes wrong in one way, later ones do not."""

    def __init__(self, kind):
        super().__init__(kinds=(kind,))
        self.left = [kind]

    def choose(self):
        return self.left.pop() if self.left else None
