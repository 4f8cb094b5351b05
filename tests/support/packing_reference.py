"""Slow, obvious reference of packing (design, section 3). Standard library only; whole lists on purpose."""

from __future__ import annotations

from tests.support import order_reference as ref

EOS = -1


def documents(block_rows, run_rows, lengths, seed, epoch, eos, *, shuffle=True):
    """Runs along the line, each a list of documents; a document is (sample id, number of tokens, its eos included).

    ``lengths`` has one entry a sample: the number of its tokens, or None where it holds no list.
    """
    first = [sum(block_rows[:b]) for b in range(len(block_rows))]
    runs, last = [], None
    for b, row in ref.line(block_rows, run_rows, seed, epoch, shuffle):
        if (b, row // run_rows[b]) != last:
            last = (b, row // run_rows[b])
            runs.append([])
        sample = first[b] + row
        if lengths[sample] is not None:
            runs[-1].append((sample, lengths[sample] + eos))
    return runs


def tokens_of(document, lengths):
    """A document's tokens as (sample id, offset); its eos as (sample id, EOS)."""
    sample, num_tokens = document
    return [(sample, k if k < lengths[sample] else EOS) for k in range(num_tokens)]


def line(runs, lengths):
    return [token for run in runs for document in run for token in tokens_of(document, lengths)]


def sequences(tokens, length):
    """Sequence q holds the tokens q·T .. q·T + T: T inputs and T targets, overlapping by one."""
    return [tokens[q * length : q * length + length + 1] for q in range(ref.num_sequences(len(tokens), length))]


def cut(tokens, length):
    """A document too long for one sequence, cut like a line of its own."""
    return [tokens] if len(tokens) <= length + 1 else sequences(tokens, length)


def unpacked_sequences(run, lengths, length):
    """One document a sequence, those too long for one cut. Sequences as lists of parts."""
    return [[part] for document in run for part in cut(tokens_of(document, lengths), length) if part]


def whole_sequences(run, lengths, length):
    """Best fit decreasing: longest first, each where it leaves the least room. Sequences as lists of parts."""
    parts = [part for document in run for part in cut(tokens_of(document, lengths), length) if part]
    fitted = []  # lists of indices of parts
    for index in sorted(range(len(parts)), key=lambda index: -len(parts[index])):
        rooms = [length + 1 - sum(len(parts[k]) for k in sequence) for sequence in fitted]
        fits = [(room, k) for k, room in enumerate(rooms) if room >= len(parts[index])]
        if fits:
            fitted[min(fits)[1]].append(index)
        else:
            fitted.append([index])
    return [[parts[k] for k in sorted(sequence)] for sequence in sorted(fitted, key=min)]
