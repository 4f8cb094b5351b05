"""Ranks agree on something through the store of their process group.

No collective is run, so nobody hangs where the others are not: there is a deadline, the ranks that did not come are
named, and every rank gets the same verdict, be it a value or an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardstream import errors
from shardstream.errors import listed
from shardstream.torch.deadline import NoAnswerError, PatientStore
from shardstream.torch.topology import data_parallel_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GRACE_S = 2.0  # so that the others learn what the first rank found, and not only that it said nothing


def agree(
    topic: str,
    offer: Any,
    decide: Callable[[Mapping[int, Any]], Any],
    *,
    group: ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    timeout_s: float = 60.0,
) -> Any:
    """Every rank makes an offer, the first one decides once all have, and every rank gets what it decided.

    Args:
        topic: What it is about: ranks that meet for different things do not meet.
        offer: JSON values.
        decide: Called on the first rank with the offers by global rank, in order; returns JSON values. The errors of
            this package that it raises are raised on every rank.
        group: The ranks that meet; default all.
        ranks: Their global ranks, as the other way to say it: in the same order on each of them.
        timeout_s: Until all must have come.

    Returns:
        What ``decide`` returned.

    Raises:
        TopologyError: If a rank does not come in time; it says which.
        ShardStreamError: What ``decide`` raised.

    Example:
        >>> agree("the sum", 2, lambda offers: sum(offers.values()))  # one process: nothing is communicated
        2
    """
    ranks = data_parallel_ranks(group) if ranks is None else list(ranks)
    if len(ranks) == 1:
        return decide({ranks[0]: offer})
    me = dist.get_rank()
    try:
        return _meet(topic, offer, decide, ranks, me, timeout_s)
    except NoAnswerError as error:
        what = f"the store of the process group does not answer; asked about {topic}"
        hint = "the host of rank 0 (or of torchrun's first agent) is gone, stopped or cut off"
        raise errors.TopologyError(what, found=error, hint=hint) from error


def _meet(
    topic: str,
    offer: Any,
    decide: Callable[[Mapping[int, Any]], Any],
    ranks: list[int],
    me: int,
    timeout_s: float,
) -> Any:
    store = _place(topic, ranks, me, timeout_s)
    store.set(_key(me), json.dumps(offer))
    timeout = timedelta(seconds=timeout_s)
    if me == ranks[0]:
        verdict = _verdict(store, ranks, decide, topic, timeout)
        store.set("verdict", json.dumps(verdict))
    else:
        try:
            store.wait(["verdict"], timeout + timedelta(seconds=_GRACE_S))
        except RuntimeError:  # of every store its own kind
            raise _late(store, ranks, topic, timeout) from None
        verdict = json.loads(store.get("verdict"))
    if "error" in verdict:
        raise getattr(errors, verdict["error"])(verdict["text"])
    store.delete_key(_key(me))
    return verdict["value"]


def _verdict(
    store: PatientStore, ranks: list[int], decide: Callable[[Mapping[int, Any]], Any], topic: str, timeout: timedelta
) -> dict[str, Any]:
    """On the first rank: what came of it, as JSON values."""
    try:
        try:
            store.wait([_key(rank) for rank in ranks], timeout)
        except RuntimeError:  # of every store its own kind
            raise _late(store, ranks, topic, timeout) from None
        return {"value": decide({rank: json.loads(store.get(_key(rank))) for rank in ranks})}
    except errors.ShardStreamError as error:
        return {"error": type(error).__name__, "text": str(error)}


def _late(store: PatientStore, ranks: list[int], topic: str, timeout: timedelta) -> errors.TopologyError:
    """Says who is missing; where nobody is, the first rank was too slow to decide."""
    missing = [rank for rank in ranks if not store.check([_key(rank)])]
    return errors.TopologyError(
        f"{len(ranks) - len(missing)} of {len(ranks)} ranks came to {topic} within {timeout.total_seconds():g} s",
        expected=f"all of them; missing {listed(missing)}" if missing else f"a verdict of rank {ranks[0]} as well",
        hint="a rank stopped, was slow, or took another branch: look at the logs of those that are missing",
    )


def _place(topic: str, ranks: list[int], me: int, timeout_s: float) -> PatientStore:
    """The keys of this meeting: of these ranks, for this topic, for the n-th time."""
    name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    everyones = PatientStore(dist.distributed_c10d._get_default_store(), timeout_s)  # noqa: SLF001
    store = everyones.prefixed(f"shardstream/{topic}/{name}")
    return store.prefixed(f"visit{store.add(_key(me), 1)}")


def _key(rank: int) -> str:
    return f"rank{rank}"
