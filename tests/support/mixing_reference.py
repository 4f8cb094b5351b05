"""Slow, obvious reference of mixtures (design, issue 5). Standard library only; whole lists on purpose."""

from __future__ import annotations

from fractions import Fraction

TABLE_POSITIONS = 65536


def totals(weights, num_positions):
    """Largest remainder; then every source with a weight gets one, taken from the one that has most."""
    exact = [Fraction(str(float(w))) * num_positions / sum(Fraction(str(float(v))) for v in weights) for w in weights]
    got = [int(e) for e in exact]
    while sum(got) < num_positions:
        k = max(range(len(got)), key=lambda k: (exact[k] - got[k], -k))
        got[k] += 1
    for k, weight in enumerate(weights):
        if weight > 0 and got[k] == 0:
            got[got.index(max(got))] -= 1
            got[k] = 1
    return got


def table(weights, global_batch, most_windows=None):
    """Windows, each the number of samples of each source: one sample at a time to the source furthest behind."""
    num_windows = -(-TABLE_POSITIONS // global_batch)
    share = totals(weights, num_windows * global_batch)  # of num_windows * global_batch
    served, windows = [0] * len(weights), []
    for w in range(min(num_windows, most_windows or num_windows)):
        window = [0] * len(weights)
        for _ in range(global_batch):
            behind = [share[k] * (w + 1) - served[k] * num_windows for k in range(len(weights))]
            k = behind.index(max(behind))
            served[k] += 1
            window[k] += 1
        windows.append(window)
    return windows


def eras(entries, global_batch):
    """[(first window, weights)] of [(position, weights)]: entries round up to windows, the later one wins.

    Weights that are what they were, times a number, change nothing.
    """
    found = {}
    for position, weights in entries:
        found[-(-position // global_batch)] = [
            Fraction(str(float(w))) / sum(Fraction(str(float(v))) for v in weights) for w in weights
        ]
    changes = []
    for begin, weights in sorted(found.items()):
        if not changes or changes[-1][1] != weights:
            changes.append((begin, weights))
    return changes


def stream(entries, global_batch, num_windows):
    """Windows of (source, position in the source over all its passes); fewer windows than a table has."""
    known, had, windows = eras(entries, global_batch), [0] * len(entries[0][1]), []
    tables = [table(weights, global_batch, num_windows) for _, weights in known]
    for w in range(num_windows):
        index = max(k for k, (begin, _) in enumerate(known) if begin <= w)
        window = []
        for source, n in enumerate(tables[index][w - known[index][0]]):
            window += [(source, had[source] + i) for i in range(n)]
            had[source] += n
        windows.append(window)
    return windows
