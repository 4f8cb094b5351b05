"""How many samples of a rank were masked so far, and how many may be. In the main process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from shardstream.errors import DecodeError, PlanError, ReadError, ShardStreamWarning
from shardstream.quarantine import MaskedSample, write_masked

LEAST_SEEN = 10_000
"""A rank's share of masked samples is taken of so many rows at least: a bad start is no bad data set."""

_NUM_SHOWN = 3


class MaskedBudget:
    """Counts what a rank's loop gets, reports what was masked of it, and stops the job if that is too much.

    Args:
        max_fraction: Masked samples by rows, from which on the job stops: of at least ``LEAST_SEEN`` rows, so that by
            0.01 the first 100 samples are let through. 0 lets none through, 1 all.
        quarantine: Folder of the report; None for none.

    Raises:
        PlanError: If the fraction is not between 0 and 1.

    Example:
        >>> budget = MaskedBudget(0.01, None)
        >>> budget.took(8, [])
        >>> budget.num_rows, budget.num_masked
        (8, 0)
    """

    def __init__(self, max_fraction: float, quarantine: str | os.PathLike[str] | None) -> None:
        if not 0 <= max_fraction <= 1:
            raise PlanError("max_masked_fraction is a fraction", expected="0 to 1", found=max_fraction)
        self.max_fraction, self.quarantine = max_fraction, quarantine
        self.num_rows = self.num_masked = 0
        self._last: tuple[MaskedSample, ...] = ()

    def anew(self) -> MaskedBudget:
        """Returns one with the same settings that has counted nothing."""
        return MaskedBudget(self.max_fraction, self.quarantine)

    def took(self, num_rows: int, masked: Sequence[MaskedSample]) -> None:
        """Counts a batch that the loop gets.

        Args:
            num_rows: Its rows.
            masked: What was masked of it.

        Raises:
            DecodeError: If too much was masked by now.
            ReadError: If the report cannot be written.
        """
        self.num_rows += num_rows
        if not masked:
            return
        self._report(masked)
        self.num_masked += len(masked)
        self._last = (*self._last, *masked)[-_NUM_SHOWN:]
        if self.num_masked > self.max_fraction * max(self.num_rows, LEAST_SEEN):
            raise self._too_many(masked[0].rank)

    def _report(self, masked: Sequence[MaskedSample]) -> None:
        if self.quarantine is not None:
            try:
                write_masked(self.quarantine, masked[0].rank, masked)
            except OSError as error:
                what = "the quarantine report cannot be written"
                raise ReadError(what, url=str(self.quarantine), found=error, hint="make room, or move it") from error
        elif not self.num_masked:
            text = f"samples are masked, and no report names them (give quarantine=): {masked[0]}"
            warnings.warn(text, ShardStreamWarning, stacklevel=4)

    def _too_many(self, rank: int) -> DecodeError:
        last = "; ".join(map(str, self._last))
        where = "give quarantine= to have them all named" if self.quarantine is None else f"look at {self.quarantine}"
        return DecodeError(
            f"too many samples of rank {rank} cannot be decoded",
            expected=f"at most {self.max_fraction:g} of {max(self.num_rows, LEAST_SEEN):,} rows (max_masked_fraction)",
            found=f"{self.num_masked:,} of {self.num_rows:,}, the last: {last}",
            hint=f"{where}; mend the data or the transform, or allow more",
        )
