"""Packed sequences in a ``StreamingDataset``: what its options mean, and what is known of windows beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardstream.errors import PlanError
from shardstream.manifest import Manifest
from shardstream.mixture_plan import AnyPlan, MixturePlan
from shardstream.packed_layout import COLUMNS
from shardstream.packing import Packing, PackingMode
from shardstream.permutation import Int64Array
from shardstream.plan import Plan
from shardstream.torch.assemble import Assembly
from shardstream.torch.batch import Place

LABELS = "labels"


def packing_of(
    packing: Packing | PackingMode | None,
    sequence_length: int | None,
    tokens_column: str | None,
    eos_id: int | None,
    manifest: Manifest,
) -> Packing | None:
    """Returns the packing that a dataset's options ask for; None without any.

    Args:
        packing: All of it, or only its mode.
        sequence_length: T, where ``packing`` does not say it.
        tokens_column: The column, where ``packing`` does not; default the manifest's.
        eos_id: The token after each document, where ``packing`` does not.
        manifest: The data set.

    Raises:
        PlanError: If options are missing, or are said twice.

    Example:
        >>> manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=1)
        >>> packing_of("whole", 2048, None, 0, manifest).identity()["mode"]
        'whole'
    """
    shortcuts = {"sequence_length": sequence_length, "tokens_column": tokens_column, "eos_id": eos_id}
    given = [name for name, value in shortcuts.items() if value is not None]
    if isinstance(packing, Packing):
        if given:
            raise PlanError(f"{' and '.join(given)} belong into packing=Packing(...)", hint="say it in one place")
        return packing
    if sequence_length is None:
        if packing is not None or given:
            asked = [*["packing"] * (packing is not None), *given]
            raise PlanError(f"{' and '.join(asked)} need sequence_length", hint="give sequence_length=")
        return None
    column = tokens_column or manifest.tokens_column or "tokens"
    return Packing(sequence_length, column=column, eos_id=eos_id, mode=packing or "tokens")


def packed_assembly(assembly: Assembly, columns: Sequence[str] | None) -> Assembly:
    """Returns what is done to packed sequences: one head ``lm`` over ``labels``, unless targets are named.

    Raises:
        PlanError: If something is asked for that sequences cannot do.
    """
    if assembly.transform is not None:
        raise PlanError(
            "packing cuts sequences from tokens that are counted beforehand, which a transform would change",
            found="transform=",
            hint="write a column of token lists first (`shardstream tokenize`), and leave transform out",
        )
    if assembly.collate is not None and not getattr(assembly.collate, "takes_columns", False):
        hint = "give it a true attribute takes_columns: it then gets the dict of a batch's columns"
        raise PlanError("packed sequences are no list of samples that collate could take", hint=hint)
    if assembly.dtypes:
        hint = "name the type of raw tokens: packing=Packing(..., tokens_dtype=)"
        raise PlanError("dtypes= is for samples, not for packed sequences", found=sorted(assembly.dtypes), hint=hint)
    if assembly.shifted is False:
        hint = "leave shifted out: labels[t] is the token after input_ids[t]"
        raise PlanError("labels of packed sequences are shifted", expected=True, found=False, hint=hint)
    made = replace(assembly, targets=assembly.targets or {"lm": LABELS}, shifted=True)
    wanted = COLUMNS if columns is None else columns
    for name in [*wanted, *(target for target in made.targets.values() if isinstance(target, str))]:
        if name not in COLUMNS or (name not in wanted and made.collate is None):
            where = "packed sequences have" if name not in COLUMNS else "columns= names"
            raise PlanError(f"{where} no column {name!r}", expected=" or ".join(COLUMNS))
    return made


def constant_targets(plan: AnyPlan, assembly: Assembly, place: Place) -> dict[str, int] | None:
    """Returns the targets of each head in a window over all ranks where they follow from positions alone.

    Without masks every token but the line's first is a target, so that a window of G sequences has G x T, but for what
    is missing of the line's last sequence.

    Args:
        plan: The plan.
        assembly: What is done to rows.
        place: Of a micro-batch of the window.

    Returns:
        Head name → targets; None where they must be counted: with masks, in the last, partial window of an epoch.
    """
    if not _follow_from_positions(assembly):
        return None
    first_epoch, first_position, *_ = place.pass_start
    begin = first_position + place.window_index * plan.global_batch
    if isinstance(plan, MixturePlan):
        return _constant_of_mixture(plan, assembly, begin + np.arange(plan.global_batch))
    epoch, position = divmod(first_epoch * plan.num_positions + begin, plan.num_positions)
    if position + plan.global_batch > plan.num_positions and plan.tail != "continue":
        return None
    num_targets = _num_targets(plan, epoch, position + np.arange(plan.global_batch))
    return None if num_targets is None else dict.fromkeys(assembly.targets, num_targets)


def _constant_of_mixture(plan: MixturePlan, assembly: Assembly, positions: Int64Array) -> dict[str, int] | None:
    """The targets of whole heads, and of each source's."""
    places, of_source = plan.sources(positions), {}
    for index, (name, each) in enumerate(plan.by_name.items()):
        num_targets = _num_targets(each, 0, places.position[places.source == index])
        if num_targets is None:
            return None
        of_source[name] = num_targets
    heads = dict.fromkeys(assembly.targets, sum(of_source.values()))
    return heads | {f"{head}/{name}": num for head in assembly.targets for name, num in of_source.items()}


def known_targets(
    plan: AnyPlan, assembly: Assembly, sample_ids: Int64Array, source_index: Int64Array | None
) -> Int64Array | None:
    """Returns the targets of each sequence where they follow from its place on the line: none need be counted.

    Args:
        plan: The plan.
        assembly: What is done to rows.
        sample_ids: int64[n], places on the line.
        source_index: int64[n], the source of each, in a mixture.

    Returns:
        int64[n]; None where they must be counted.
    """
    if not _follow_from_positions(assembly):
        return None
    if not isinstance(plan, MixturePlan):
        return _targets_of(plan, sample_ids)
    assert source_index is not None  # noqa: S101 - rows of a mixture have it
    num_targets = np.zeros(len(sample_ids), np.int64)
    for index, of_plan in enumerate(plan.plans):
        rows = np.flatnonzero(source_index == index)
        of_source = _targets_of(of_plan, sample_ids[rows])
        if of_source is None:
            return None
        num_targets[rows] = of_source
    return num_targets


def _follow_from_positions(assembly: Assembly) -> bool:
    """Whether all heads count labels as they were cut, and no token looks like one that does not count."""
    only_labels = set(assembly.targets.values()) <= {LABELS}
    return assembly.collate is None and only_labels and assembly.ignore_index < 0


def _num_targets(plan: Plan, epoch: int, positions: Int64Array) -> int | None:
    """Targets of the sequences at positions; None if that does not follow from positions alone."""
    if plan.packed is None or not plan.packed.packing.has_constant_targets:
        return None
    num_targets = _targets_of(plan, plan.sample_ids(epoch, positions))
    return None if num_targets is None else int(num_targets.sum())


def _targets_of(plan: Plan, places: Int64Array) -> Int64Array | None:
    packed = plan.packed
    if packed is None or not packed.packing.has_constant_targets:
        return None
    length = packed.packing.sequence_length
    num_missing = plan.num_positions * length - (packed.num_places - 1)
    return np.where(places == plan.num_positions - 1, length - num_missing, length)
