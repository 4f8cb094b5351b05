"""A fault that passes."""

from __future__ import annotations

from tools.faults import Faults


class Once(Faults):
    """The first request for data goes wrong in one way, later ones do not."""

    def __init__(self, kind):
        super().__init__(kinds=(kind,))
        self.left = [kind]

    def choose(self):
        return self.left.pop() if self.left else None
