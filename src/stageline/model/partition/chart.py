"""The balance of a partition as a text chart: one bar per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stageline.model.partition.partition import Partition

BAR, PALE, MARK = "█", "░", "│"
MAX_RANKS = 64
MIN_BAR = 10


def chart(partition: Partition, before: Partition | None, width: int) -> str:
    """Return one bar per rank, with a mark at the bound; with `before`, also the bars of that partition."""
    longest = max(partition.slowest, before.slowest if before is not None else 0.0) or 1.0
    ranks = len(partition.loads)
    visible = (
        range(ranks) if ranks <= MAX_RANKS else [*range(MAX_RANKS // 2), *range(ranks - MAX_RANKS // 2 + 1, ranks)]
    )
    heads = {rank: f"rank {rank}".ljust(len(f"rank {ranks - 1}")) for rank in visible}
    layers = {rank: _layers(partition, rank) for rank in visible}
    old_layers = {rank: _layers(before, rank) for rank in visible} if before is not None else {}
    column = max(map(len, (*layers.values(), *old_layers.values())))
    tails = {rank: _tail(partition, rank) for rank in visible}
    tail_width = max(
        map(len, (*tails.values(), *((_tail(before, rank) for rank in visible) if before is not None else ())))
    )
    margin = len(heads[0]) + 2 + column + 2
    bar = max(MIN_BAR, width - margin - 2 - tail_width)
    mark = round(bar * partition.bound / longest)

    def line(head: str, spans: str, load: float, letter: str, tail: str) -> str:
        filled = (letter * round(bar * load / longest)).ljust(bar + 1)
        if filled[mark : mark + 1] == " ":
            filled = filled[:mark] + MARK + filled[mark + 1 :]
        return f"{head}  {spans.ljust(column)}  {filled} {tail}".rstrip()

    lines = _title(partition, before)
    for rank in visible:
        if before is not None:
            lines.append(line(heads[rank], old_layers[rank], before.loads[rank], PALE, _tail(before, rank)))
        head = heads[rank] if before is None else " " * len(heads[rank])
        lines.append(line(head, layers[rank], partition.loads[rank], BAR, tails[rank]))
        if len(visible) < ranks and rank == MAX_RANKS // 2 - 1:
            lines.append(f"{'…'.rjust(len(heads[rank]))}  ({ranks - len(visible)} ranks not shown)")
    return "\n".join(lines)


def _title(partition: Partition, before: Partition | None) -> list[str]:
    sizes = f"{partition.layers} layers, {len(partition.stages)} stages, {len(partition.loads)} ranks"
    quality = (
        "no cut is better"
        if partition.optimal
        else f"at most {100 * partition.gap:.2g}% above the best ({MARK} {partition.bound:.4g})"
    )
    slowest = f"slowest {partition.slowest:.4g} (rank {partition.loads.index(partition.slowest)}): {quality}"
    if before is None:
        return [sizes, slowest]
    ratio = f", {before.slowest / partition.slowest:.3g} times as fast" if partition.slowest else ""
    return [
        sizes,
        f"{PALE} before: slowest {before.slowest:.4g} (rank {before.loads.index(before.slowest)})",
        f"{BAR} after: {slowest}{ratio}",
    ]


def _layers(partition: Partition, rank: int) -> str:
    """Return the layers of a rank, stage by stage: 0-3 12-15."""
    others = partition.also_on or partition.rank_of
    spans = [
        span for span, *holders in zip(partition.stages, partition.rank_of, others, strict=True) if rank in holders
    ]
    return " ".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in spans)


def _tail(partition: Partition, rank: int) -> str:
    """Return the time and memory of a rank."""
    text = f"{partition.loads[rank]:.4g}"
    if partition.memory is None:
        return text
    text += f"  {partition.memory[rank]:.4g} bytes"
    if partition.caps is None:
        return text
    return (
        text
        + f" of {partition.caps[rank]:.4g}"
        + (" (too much)" if partition.memory[rank] > partition.caps[rank] else "")
    )
