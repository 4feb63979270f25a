"""From a user's batch to the microbatches of a step: check it, agree on it with all ranks, and cut it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageline.common.errors import PipelineError, StagelineError, shorten
from stageline.distributed.rank_host import Floats, RankHost
from stageline.model.huggingface import own_loss
from stageline.runtime._torch_private import pytree
from stageline.runtime.batches import comparison
from stageline.runtime.batches.chunk_specs import ChunkSpecs, CutRule, Keywords, cut_of, is_mask
from stageline.runtime.batches.comparison import COUNT, MODE, NAMES, REFUSED, SCALE, BatchRow
from stageline.runtime.batches.input_gradients import Roots, prepare_inputs
from stageline.runtime.batches.opaque_objects import is_plain
from stageline.runtime.executor import StepRequest
from stageline.runtime.rank_executors import ExecutorSet
from stageline.runtime.setup.model_stages import ModelStages
from stageline.runtime.setup.options import PipelineOptions, Reduction
from stageline.schedules.schedule import Schedule
from stageline.tensors.sharded import is_sharded, plain_tensors


@dataclass(frozen=True)
class Batch:
    """The batch that a user passes, and how to run it, in this replica."""

    inputs: Any
    targets: Any = None
    keywords: Keywords | None = None
    training: bool = False
    with_targets: bool = True
    keep: bool = False
    """Whether to return the outputs."""
    count: float | None = None
    scale: float = 1.0
    sync: bool = True
    """Whether gradients are added up over replicas."""
    check_gradients: bool = True
    """Whether gradients that are not finite fail the step."""

    @property
    def columns(self) -> list[int]:
        """The indices into `NAMES` of what must be the same on all ranks of a replica."""
        return [0, 1, 2, 3, SCALE, COUNT, MODE] if self.with_targets else [0, 1, 3, MODE]

    @property
    def mode(self) -> int:
        """Training, evaluation or prediction, and `sync`, as a number."""
        return comparison.call_number(self.training, self.with_targets, self.sync)


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on before a step."""

    samples: int
    """Of this replica."""
    total: int
    """Of all replicas."""
    rows: Callable[[], Floats]
    """Waits for the rows of all ranks of this replica, to be compared."""
    refused: Exception | None = None
    """Why this process cannot run the batch."""
    start: Callable[[], object] = lambda: None
    """Sends this rank's row, if that was put off; all ranks do so before they end the step together."""
    by_row: Sequence[int] = ()
    """The samples of every replica, or row of a larger mesh."""


class BatchIntake:
    """Takes in the batches of a pipeline, on every process."""

    def __init__(self, options: PipelineOptions, schedule: Schedule, host: RankHost, stages: ModelStages) -> None:
        self._options, self._host, self._stages = options, host, stages
        self.parts, self._stage_count = schedule.microbatches, schedule.stages
        """How many microbatches a batch is cut into."""
        table = schedule.placement.table
        self.first_ranks, self.last_ranks = (sorted(set(table[:, stage].tolist())) for stage in (0, -1))
        self.readers = {1: set(self.first_ranks), 2: set(self.last_ranks)}
        """By index into `NAMES`: the ranks that read the inputs, and those that read the targets."""
        self.agreed: int | None = None
        """How many samples all ranks had in the last step."""

    def targets(self, targets: Any) -> Any:
        """The targets of the loss: a model that computes its own loss has them among its inputs."""
        return None if self._options.loss_fn is own_loss else targets

    def validate(self, batch: Batch) -> BatchRow:
        """Check that a batch can be cut."""
        specs, alone = self._options.chunk_specs, self._host.single_process
        if alone and specs.kwargs is not None and batch.training:
            specs.refuse_unknown(batch.inputs, batch.keywords)
        if batch.keep:
            specs.refuse_merge()
        compared = not alone or self._host.layout.tensors > 1
        valid = validate_batch(self._stage_count, batch.inputs, batch.targets, batch.keywords, compared, specs)
        if alone and batch.inputs is None:
            raise StagelineError("the inputs are None; the first stage needs them")
        if alone and valid.samples is None:
            raise StagelineError(
                f"the chunk specs pass the whole batch to every microbatch, so nothing can be cut into {self.parts} "
                "microbatches; cut at least one tensor"
            )
        settings = [float(batch.scale), float(batch.count or 0), 2.0 if self._stages.model.training else 1.0]
        return BatchRow(valid.samples, np.concatenate([valid.row, settings]), valid.digests)

    def disagreement(self, rows: Floats, batch: Batch) -> str:
        """Say what is wrong with the batches of the ranks; empty if all of them agree."""
        if rows[0, 1] > 0 and bool((rows == rows[0]).all()):  # the usual case
            return ""
        return comparison.disagreement(rows, batch.columns, self.readers)

    def agree(self, batch: Batch, elements: int) -> Agreement:
        """Agree on the batch with all ranks.

        Only a rank without a batch, or with a different number of samples from the last step, waits until it knows the
        batches of the others. With replicas, all ranks wait.
        """
        host, refused = self._host, None
        try:
            own = self.validate(batch)
        except StagelineError as error:
            if host.single_process and host.replica_group is None:
                raise
            refused, own = error, BatchRow(None, np.array(REFUSED))
        if host.replica_group is not None:
            more = [batch.mode, batch.count or 0, elements, refused is not None]
            known = host.all_gather(np.concatenate([own.complete(), np.array(more, dtype=float)]))
            columns = [] if host.single_process else batch.columns
            counts = comparison.agree_replicas(host, known, columns, self.readers, refused)
            compared = known[host.replica, :, : len(NAMES)]
            total = sum(counts[:: host.layout.tensors])
            return Agreement(counts[host.replica], total, lambda: compared, by_row=counts)
        start = cache(lambda: host.all_gather_async(_complete(own)))

        def rows() -> Floats:
            first: Floats = start()()[0]
            return first

        if own.samples is not None and (host.single_process or own.samples == self.agreed):
            if own.digests is None:
                start()
            return Agreement(own.samples, own.samples, rows, refused, start)
        known = rows()
        sizes = set(known[:, 0].tolist()) - {0.0}
        apart = comparison.difference(known, [0])
        if not sizes or (apart and self.agreed not in sizes):  # and every rank knows it
            raise refused or PipelineError(apart or "no rank received the inputs")
        samples = int(self.agreed) if apart and self.agreed is not None else int(sizes.pop())
        return Agreement(samples, samples, rows, refused or (PipelineError(apart) if apart else None))

    def request(self, executors: ExecutorSet, batch: Batch, step: int, samples: int, total: int) -> StepRequest:
        """Cut the batch, and refuse what a step cannot do with it; parts that would be empty are left out.

        `samples` are those of this replica, `total` those of all.
        """
        parts, specs, training = self.parts, self._options.chunk_specs, batch.training
        filled = min(parts, samples)
        whole: Any = batch.inputs
        wants: Sequence[bool] = ()
        roots: Roots = ()
        if training and not (_has_no_graph(batch.inputs) and _has_no_graph(batch.targets) and not batch.keywords):
            replicas = self._host.layout.replicas
            whole, wants, roots = prepare_inputs(batch.inputs, batch.targets, batch.keywords, replicas)
        with torch.enable_grad() if wants else nullcontext():  # gradients go from the parts to the whole
            inputs = input_parts(whole, parts, filled, specs)
        request = StepRequest(
            step=step,
            samples=total,
            inputs=inputs,
            inputs_require_grad=wants,
            input_roots=roots,
            targets=target_parts(batch.targets, parts, filled, specs) if batch.with_targets else [],
            weights=weights(
                self._options.loss_reduction, samples, parts, filled, batch.count, not batch.with_targets, total
            ),
            keywords=keyword_parts(batch.keywords, self._stage_count, parts, filled, specs) if batch.keywords else {},
            training=training,
            keep_outputs=batch.keep,
            scale=batch.scale,
            check_finite=self._options.check_finite,
            check_gradients=batch.check_gradients,
        )
        if training and not self._stages.plain:
            self._stages.placed.refuse_hooks(self._stages.name_of)
        if training and self._stages.sharded:
            self._stages.refuse_hooks()
        for executor in executors.executors if request.keywords else ():
            for stage, keywords in request.keywords.items():
                if stage in executor.stages:
                    executor.stages[stage].check_keywords(list(keywords[0]))
        return request


def validate_batch(
    stages: int, inputs: Any, targets: Any, keywords: Keywords | None, digests: bool, specs: ChunkSpecs
) -> BatchRow:
    """Refuse parts with different numbers of samples; compute digests if they are to be compared."""
    sizes = _sizes(inputs, _inputs_spec(inputs, specs), "the inputs", "", needed=specs.default)
    option = "pass a targets_chunk_spec= with None in its place"
    # A target without dimensions goes to every microbatch.
    needed = specs.default and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(targets))
    sizes += _sizes(targets, _targets_spec(targets, specs), "the targets", option, needed=needed)
    if keywords is not None and not isinstance(keywords, Mapping):
        raise StagelineError(f"stage_kwargs must be a dict by stage, got {shorten(keywords)}")
    for stage, values in (keywords or {}).items():
        if stage != "all" and not (isinstance(stage, int) and 0 <= stage < stages):
            raise StagelineError(f"stage_kwargs has the key {stage!r}; pass a stage from 0 to {stages - 1}, or 'all'")
        if not isinstance(values, Mapping):
            raise StagelineError(f"stage_kwargs[{stage!r}] is {shorten(values)}; pass a dict of keyword inputs")
        for name, part in values.items():
            what, option = f"stage_kwargs[{stage!r}][{name!r}]", f"pass kwargs_chunk_spec={{{name!r}: None}}"
            sizes += _sizes(part, specs.of_keyword(name), what, option)
    for size, what in sizes[1:]:
        if size != sizes[0][0]:
            raise StagelineError(
                f"there are {sizes[0][0]} samples of {sizes[0][1].removeprefix('the ')} and {size} of "
                f"{what.removeprefix('the ')}; pass the same number of each, or use a chunk spec for values that are "
                "not split along their first dimension (see args_chunk_spec of sl.Pipeline)"
            )
    samples = sizes[0][0] if sizes else None
    if samples == 0:
        raise StagelineError("the batch has no samples")
    parts = (inputs, targets, (keywords or {}).get("all"))
    later = digests_later(parts) if digests else None
    row = [float(samples or 0), *(float(digest(part)) if digests and later is None else 0.0 for part in parts)]
    return BatchRow(samples, np.array(row), later)


def _inputs_spec(inputs: Any, specs: ChunkSpecs) -> Any:
    return CutRule.DEFAULT if specs.default else specs.of_inputs(inputs)


def _targets_spec(targets: Any, specs: ChunkSpecs) -> Any:
    return CutRule.DEFAULT if specs.default else specs.of_targets(targets)


def _is_dense(part: Any, spec: Any) -> bool:
    """Whether a part of a batch is one dense tensor, to be cut along its first dimension: the usual case."""
    plain = type(part) is Tensor and spec is CutRule.DEFAULT
    return plain and part.layout is torch.strided and not part.is_nested and part.dim() > 0


def _sizes(part: Any, spec: Any, what: str, option: str, needed: bool = False) -> list[tuple[int, str]]:
    """The number of samples of each tensor that is cut; `needed` refuses a part without such a tensor."""
    if part is None:
        return []
    if _is_dense(part, spec):
        return [(int(part.shape[0]), what)]
    if any(map(is_sharded, pytree.tree_leaves(part, is_leaf=is_mask))):
        raise StagelineError(
            f"{what} contain a DTensor; pass plain tensors with the samples of this data coordinate, which are the "
            "same on processes that differ only in pp or tp"
        )
    sizes = cut_of(part, spec, what, option).sizes()
    if not sizes and needed:
        raise StagelineError(
            f"{what} must contain tensors with the same first dimension, the number of samples; "
            "found no tensor with a first "
            f"dimension in {shorten(part)}"
        )
    return sizes


def _complete(own: BatchRow) -> Floats:
    """The whole row; without digests if the GPU failed, which fails the step: the others must still be told."""
    try:
        return own.row if own.digests is None else own.complete()
    except RuntimeError:
        return own.row


def _leaves(part: Any) -> list[Any]:
    """The values of a part of a batch, which is usually one tensor; a mask is one value."""
    return [part] if part is None or type(part) is Tensor else pytree.tree_leaves(part, is_leaf=is_mask)


def digests_later(parts: Sequence[Any]) -> Callable[[], Sequence[float]] | None:
    """What copies tensors of a GPU to the host and computes the digests, beside the actions that are issued meanwhile.

    None if no tensor is on a GPU.
    """
    leaves = [leaf for part in parts for leaf in _leaves(part)]
    if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
        return None

    def copied(leaf: Any) -> Any:
        if not (type(leaf) is Tensor and leaf.is_cuda and leaf.layout is torch.strided and not leaf.is_nested):
            return leaf
        plain = leaf.detach().resolve_conj().resolve_neg()
        return torch.empty(plain.shape, dtype=plain.dtype, pin_memory=True).copy_(plain, non_blocking=True)

    ready = torch.cuda.current_stream().record_event()

    def digests() -> list[float]:
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_event(ready)
        with torch.cuda.stream(side):
            copies = [pytree.tree_map(copied, part, is_leaf=is_mask) for part in parts]
        side.synchronize()
        return [float(digest(part)) for part in copies]

    return digests


def digest(tree: Any) -> int:
    """A digest of a batch as a number of 52 bits, which a float holds exactly; 0 for None."""
    if tree is None:
        return 0
    hasher = hashlib.blake2b(digest_size=8)
    for leaf in _leaves(tree):
        if isinstance(leaf, Tensor):
            hasher.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            for tensor in (leaf,) if type(leaf) is Tensor else plain_tensors(leaf):
                plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                hasher.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:  # the repr of an object may hold its address, which differs between ranks
            hasher.update((repr(leaf) if is_plain(leaf) else type(leaf).__qualname__).encode())
    return (int.from_bytes(hasher.digest(), "big") >> 12) | 1


def keyword_parts(
    keywords: Keywords, stages: int, parts: int, filled: int, specs: ChunkSpecs
) -> dict[int, list[dict[str, Any]]]:
    """The keyword inputs of each stage that has some, by microbatch."""
    by_stage: dict[int, list[dict[str, Any]]] = {}
    for stage in range(stages):
        values = {**keywords.get("all", {}), **keywords.get(stage, {})}
        if values:
            columns = {name: _parts(part, specs.of_keyword(name), name, parts, filled) for name, part in values.items()}
            by_stage[stage] = [{name: column[part] for name, column in columns.items()} for part in range(filled)]
    return by_stage


def input_parts(inputs: Any, parts: int, filled: int, specs: ChunkSpecs) -> list[Any]:
    """The microbatches of the inputs, without empty ones; none for None."""
    if inputs is None:
        return []
    return _parts(inputs, _inputs_spec(inputs, specs), "the inputs", parts, filled)


def _parts(value: Any, spec: Any, what: str, parts: int, filled: int) -> list[Any]:
    if _is_dense(value, spec):
        return list(value.tensor_split(parts)[:filled])
    return cut_of(value, spec, what, "", refuse=False).parts(parts, filled)


def target_parts(targets: Any, parts: int, filled: int, specs: ChunkSpecs) -> list[Any]:
    """The targets of the microbatches, without empty ones; None for each if there are no targets."""
    if targets is None:
        return [None] * filled
    return _parts(targets, _targets_spec(targets, specs), "the targets", parts, filled)


def weights(
    reduction: Reduction,
    samples: int,
    parts: int,
    filled: int,
    count: float | None,
    predicting: bool,
    total: int | None = None,
) -> list[float]:
    """The factor of each microbatch's loss; `total` is the number of samples of all replicas.

    >>> weights("mean", samples=5, parts=2, filled=2, count=None, predicting=False)
    [0.6, 0.4]
    """
    if reduction == "count" and predicting:
        return [1.0] * filled
    if reduction == "count":
        if count is None or not count > 0:
            raise StagelineError(f"loss_reduction='count' needs count=, a number of targets above 0, got {count!r}")
        return [1.0 / count] * filled
    if count is not None:
        raise StagelineError(f"count={count!r} requires loss_reduction='count', but this pipeline has {reduction!r}")
    if reduction == "sum":
        return [1.0] * filled
    return [(samples // parts + (part < samples % parts)) / (total or samples) for part in range(filled)]


def _has_no_graph(value: Any) -> bool:
    """Whether a value is a plain tensor without a graph, or None."""
    return value is None or (type(value) is Tensor and not value.requires_grad)
