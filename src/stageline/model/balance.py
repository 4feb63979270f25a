"""The balance of a cut as text: a bar for every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stageline.model.partition import Partition

BAR, PALE, MARK = "█", "░", "│"
MOST_RANKS = 64
LEAST_BAR = 10


def chart(found: Partition, before: Partition | None, width: int) -> str:
    """A bar of every rank, as long as its time, and a mark where the bound is; below it, if given, that of `before`."""
    longest = max(found.slowest, before.slowest if before is not None else 0.0) or 1.0
    ranks = len(found.loads)
    shown = (
        range(ranks) if ranks <= MOST_RANKS else [*range(MOST_RANKS // 2), *range(ranks - MOST_RANKS // 2 + 1, ranks)]
    )
    heads = {rank: f"rank {rank}".ljust(len(f"rank {ranks - 1}")) for rank in shown}
    layers = {rank: _layers(found, rank) for rank in shown}
    old = {rank: _layers(before, rank) for rank in shown} if before is not None else {}
    column = max(map(len, (*layers.values(), *old.values())))
    tails = {rank: _tail(found, rank) for rank in shown}
    room = max(map(len, (*tails.values(), *((_tail(before, rank) for rank in shown) if before is not None else ()))))
    margin = len(heads[0]) + 2 + column + 2
    bar = max(LEAST_BAR, width - margin - 2 - room)
    mark = round(bar * found.bound / longest)

    def line(head: str, spans: str, load: float, letter: str, tail: str) -> str:
        drawn = (letter * round(bar * load / longest)).ljust(bar + 1)
        if drawn[mark : mark + 1] == " ":
            drawn = drawn[:mark] + MARK + drawn[mark + 1 :]
        return f"{head}  {spans.ljust(column)}  {drawn} {tail}".rstrip()

    lines = _title(found, before)
    for rank in shown:
        if before is not None:
            lines.append(line(heads[rank], old[rank], before.loads[rank], PALE, _tail(before, rank)))
        head = heads[rank] if before is None else " " * len(heads[rank])
        lines.append(line(head, layers[rank], found.loads[rank], BAR, tails[rank]))
        if len(shown) < ranks and rank == MOST_RANKS // 2 - 1:
            lines.append(f"{'…'.rjust(len(heads[rank]))}  ({ranks - len(shown)} ranks not shown)")
    return "\n".join(lines)


def _title(found: Partition, before: Partition | None) -> list[str]:
    sizes = f"{found.layers} layers, {len(found.stages)} stages, {len(found.loads)} ranks"
    how = (
        "no cut is better"
        if found.optimal
        else f"at most {100 * found.gap:.2g}% above the best ({MARK} {found.bound:.4g})"
    )
    slowest = f"slowest {found.slowest:.4g} (rank {found.loads.index(found.slowest)}): {how}"
    if before is None:
        return [sizes, slowest]
    ratio = f", {before.slowest / found.slowest:.3g} times as fast" if found.slowest else ""
    return [
        sizes,
        f"{PALE} before: slowest {before.slowest:.4g} (rank {before.loads.index(before.slowest)})",
        f"{BAR} after: {slowest}{ratio}",
    ]


def _layers(found: Partition, rank: int) -> str:
    """The layers of a rank, stage by stage: 0-3 12-15."""
    others = found.also_on or found.rank_of
    spans = [span for span, *holders in zip(found.stages, found.rank_of, others, strict=True) if rank in holders]
    return " ".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in spans)


def _tail(found: Partition, rank: int) -> str:
    """The time of a rank, and what it holds."""
    text = f"{found.loads[rank]:.4g}"
    if found.memory is None:
        return text
    text += f"  {found.memory[rank]:.4g} bytes"
    if found.caps is None:
        return text
    return text + f" of {found.caps[rank]:.4g}" + (" (too much)" if found.memory[rank] > found.caps[rank] else "")
