"""A pipeline in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stageline.runtime.pipeline import Pipeline


def described_in_words(pipe: Pipeline) -> str:
    """The model, the stages and ranks, the schedule, and where the ranks live.

    >>> import torch, stageline as sl
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> sl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule="gpipe", ranks=1, microbatches=4)
    <Pipeline of Sequential: 1 stage on 1 rank, schedule gpipe, 4 microbatches; in this process on cpu>
    """
    schedule, world = pipe.schedule, pipe._world
    tensors = (tensor for part in pipe._own_parts() for tensor in (*part.parameters(), *part.buffers()))
    devices = " and ".join(sorted({str(tensor.device) for tensor in tensors})) or "cpu"
    if pipe._alone:
        where = f"ranks are threads of this process on {devices}" if pipe.ranks > 1 else f"in this process on {devices}"
    else:
        own = ", ".join(map(str, sorted(pipe._owned)))
        replica = f" of replica {pipe.replica} of {pipe.replicas}" if pipe.replicas > 1 else ""
        word = "stage" if len(pipe._owned) == 1 else "stages"
        where = f"ranks are processes, this one is rank {world.here[0]}{replica} with {word} {own} on {devices}"
    return (
        f"<Pipeline of {type(pipe.model).__name__}: {_count(schedule.stages, 'stage')} on "
        f"{_count(schedule.ranks, 'rank')}, schedule {schedule.name}, "
        f"{_count(schedule.microbatches, 'microbatch', 'es')}; {where}>"
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
