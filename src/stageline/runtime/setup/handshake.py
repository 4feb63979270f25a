"""The handshake of all processes before the first step: the same model, schedule, options, seed and weights."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import starmap
from types import CodeType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stageline._version import __version__
from stageline.common.errors import PipelineError, StagelineError, shorten
from stageline.distributed.collectives import ProcessCollectives, first_difference
from stageline.distributed.layout import REPLICAS, SHARDS
from stageline.distributed.rank_host import Floats, RankHost
from stageline.runtime._torch_private import gathered_over, sharded_by_fsdp
from stageline.runtime.microbatches import digest
from stageline.runtime.setup.model_stages import ModelStages
from stageline.runtime.setup.options import PipelineOptions
from stageline.schedules.placement import Placement
from stageline.schedules.schedule import Schedule
from stageline.tensors.sharded import is_sharded, local, processes_of, sharding_text


def facts_of(model: nn.Module, schedule: Schedule, options: PipelineOptions) -> dict[str, str]:
    """What must be the same on all processes, as text.

    >>> import stageline as sl
    >>> schedule, options = sl.schedule("gpipe", ranks=1, microbatches=1), PipelineOptions(nn.functional.mse_loss)
    >>> facts = facts_of(nn.Linear(2, 1), schedule, options)
    >>> facts["the names and shapes of the model"]
    'weight (1, 2)\\nbias (1,)'
    >>> facts["the modules of the model"]
    'the model itself: torch.nn.modules.linear.Linear(in_features=2, out_features=1, bias=True)'
    """
    shapes = [
        f"{name} {'not known yet' if is_lazy(parameter) else tuple(parameter.shape)}"
        for name, parameter in model.named_parameters()
    ]
    types = [f"{name} {tensor.dtype}" for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    frozen = [f"{name} requires_grad={parameter.requires_grad}" for name, parameter in model.named_parameters()]
    modes = [f"{name or 'the model itself'} training={module.training}" for name, module in model.named_modules()]
    return {
        "the schedule": "\n".join([repr(schedule), *_programs(schedule)]),
        "the names and shapes of the model": "\n".join(shapes),
        "the types of the parameters and buffers": "\n".join(types),
        "the modules of the model": "\n".join(starmap(_described, model.named_modules())),
        "requires_grad of the parameters": "\n".join(frozen),
        "the modes of the modules (train or eval)": "\n".join(modes),
        "the number of threads (torch.get_num_threads)": str(torch.get_num_threads()),
        "the version of torch": str(torch.__version__),
        "the version of stageline": __version__,
        "the seed that was passed": repr(options.seed),
        "loss_reduction": options.loss_reduction,
        "loss_fn": function_fact(options.loss_fn),
        "penalty": function_fact(options.penalty),
        "parallelize": function_fact(options.parallelize),
        "reshard_after_forward": options.reshard_after_forward,
        "check_finite": str(options.check_finite),
        "compare_weights": str(options.compare_weights),
        "shard_optimizer": str(options.shard_optimizer),
        "bucket_mb and reduce_dtype": f"{options.bucket_mb:g} {options.reduce_dtype}",
        "the chunk specs": str(options.chunk_specs),
        "replan, replan_every and planned": f"{options.replan} {options.replan_every} {options.planned}",
    }


def _programs(schedule: Schedule) -> Iterator[str]:
    """The program of every rank. Processes that share layers or parameters run the same one, so that their collectives
    come in the same order.

    >>> import stageline as sl
    >>> list(_programs(sl.schedule("gpipe", ranks=1, microbatches=1)))
    ['a program of rank 0 with 2 actions and the digest ad4109610e67e9ab']
    """
    actions, sharding = (schedule.kinds, schedule.stage_ids, schedule.microbatch_ids), schedule.sharding
    for rank, own in enumerate(schedule.slices()):
        arrays: list[NDArray[Any]] = [schedule.placement.table, *(part[own] for part in actions)]
        if sharding is not None:
            own_shards = slice(int(sharding.bounds[rank]), int(sharding.bounds[rank + 1]))
            arrays += [part[own_shards] for part in (sharding.kinds, sharding.stage_ids, sharding.places)]
        order = hashlib.blake2b(b"".join(part.tobytes() for part in arrays), digest_size=8).hexdigest()
        yield f"a program of rank {rank} with {own.stop - own.start} actions and the digest {order}"


def _described(name: str, module: nn.Module) -> str:
    """A module's name and class, and the settings of torch's own modules; those of others may depend on the rank."""
    kind = type(module)
    settings = f"({module.extra_repr()})" if kind.__module__.startswith("torch.nn.") else ""
    where = kind.__module__.replace("__mp_main__", "__main__")
    return f"{name or 'the model itself'}: {where}.{kind.__qualname__}{settings}"


def function_fact(function: Any) -> str:
    """A function as a fact: its qualified name, and a digest of its code.

    >>> function_fact(lambda output, target: 1) == function_fact(lambda output, target: 2)
    False
    >>> function_fact(None), function_fact(torch.relu)
    ('None', 'torch._VariableFunctionsClass.relu')
    """
    if function is None:
        return "None"
    if isinstance(function, functools.partial):
        keywords = (f"{name}={_plain(value)}" for name, value in function.keywords.items())
        return f"partial({function_fact(function.func)}, {', '.join([*map(_plain, function.args), *keywords])})"
    if isinstance(function, nn.Module):
        return "\n".join(starmap(_described, function.named_modules()))
    called = getattr(function, "__func__", function)
    code = getattr(inspect.unwrap(called), "__code__", None)
    module = getattr(called, "__module__", None)
    name = getattr(called, "__qualname__", None)
    if name is None:  # a callable object
        module, name = type(function).__module__, type(function).__qualname__
        code = getattr(type(function).__call__, "__code__", None)
    qualified = f"{module}.{name}".replace("__mp_main__", "__main__") if module else str(name)
    if code is None:
        return qualified
    digest_of_code = hashlib.blake2b(repr(_code(code)).encode(), digest_size=4).hexdigest()
    defaults = [_plain(value) for value in getattr(called, "__defaults__", None) or ()]
    more = f", defaults {', '.join(defaults)}" if defaults else ""
    return f"{qualified}, code {digest_of_code} of Python {sys.version_info[0]}.{sys.version_info[1]}{more}"


def _code(code: CodeType) -> tuple[Any, ...]:
    """What a function does, without its place in a file."""
    constants = tuple(
        _code(constant)
        if isinstance(constant, CodeType)
        else sorted(map(repr, constant))
        if isinstance(constant, frozenset)
        else constant
        for constant in code.co_consts
    )
    return code.co_code, code.co_names, code.co_varnames, constants


def _plain(value: Any) -> str:
    """A value as text that is the same on all ranks: only the class of one that is not plain."""
    return repr(value) if value is None or isinstance(value, int | float | str | bool) else type(value).__name__


@contextmanager
def agree_on_shards(
    host: RankHost, stages: ModelStages, parallelized: bool, compare_weights: bool = True
) -> Iterator[None]:
    """Raise the same error on all processes if `parallelize` failed on one, or cut a stage differently on two.

    So too if it shards weights with FSDP2 that were different before, and `compare_weights` is set.
    """
    if not parallelized or not isinstance(host, ProcessCollectives):
        yield
        return
    failure: Exception | None = None
    failed_at = 0.0
    layout, own, weights = host.layout, list[str](), list[str]()
    try:
        before = _digests_of(stages) if compare_weights else {}
        yield
        own = _shards_of(host, stages)
        sharded = sharded_by_fsdp(_parts_of(stages))
        weights = [f"{name} {before.get(name)}" for name, parameter in _named(stages) if parameter in sharded]
    except Exception as error:
        failure, failed_at = error, time.time()
    with nullcontext() if failure is None else host.freeing_peers():
        known = host.all_gather(np.array([failed_at, float(digest(own)), float(digest(weights))]))
    times = known[..., 0]
    if times.any():
        # Others may have failed later because they waited in a collective for the first one.
        earliest = int(np.argmin(np.where(times > 0, times, np.inf)))
        process = layout.rows[earliest // layout.ranks][earliest % layout.ranks]
        own_text = "" if failure is None else str(failure)
        if not isinstance(failure, StagelineError):
            own_text = f"{type(failure).__name__}: {own_text}"
        text = host.broadcast_to_all(own_text, process)
        if isinstance(failure, StagelineError) and failure.__cause__ is None and times.all():
            raise failure  # a mistake of all processes
        raise PipelineError(f"{layout.place_name(process)} failed to build its stages: {text}") from failure
    for rank in range(layout.ranks):
        values = known[:, rank, 1].tolist()
        odd = next((row for row, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            processes = layout.rows[odd][rank], layout.rows[0][rank]
            one, other = first_difference(*(host.broadcast_to_all("\n".join(own), process) for process in processes))
            first, second = map(layout.place_name, processes)
            raise PipelineError(
                f"{first} and {second} have the same stages, but parallelize cut them differently: {first} has {one} "
                f"and {second} has {other}; cut them in the same way on all processes"
            )
        # Tensor parallel distributes the weights of its first process.
        values = known[:: layout.tensors, rank, 2].tolist()
        odd = next((row for row, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            processes = layout.rows[odd * layout.tensors][rank], layout.rows[0][rank]
            texts = [host.broadcast_to_all("\n".join(weights), process).split("\n") for process in processes]
            name = next(one.rpartition(" ")[0] for one, other in zip(*texts, strict=True) if one != other)
            first, second = map(layout.place_name, processes)
            raise PipelineError(
                f"{first} and {second} hold different values of {name}, of which each would keep a part; start all "
                "with the same weights (one torch.manual_seed before the model is built, or one checkpoint); "
                "compare_weights=False skips this check"
            )


def _parts_of(stages: ModelStages) -> list[nn.Sequential]:
    return [part for stage, part in enumerate(stages.parts) if stages.holds(stage)]


def _named(stages: ModelStages) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of this process's stages, which need not be placed yet."""
    return ((name, parameter) for part in _parts_of(stages) for name, parameter in part.named_parameters())


def _digests_of(stages: ModelStages) -> dict[str, int]:
    """Digests of the parameters of this process that exist already."""
    return {name: digest(local(parameter)) for name, parameter in _named(stages) if not parameter.is_meta}


def _shards_of(host: ProcessCollectives, stages: ModelStages) -> list[str]:
    """How the parameters of this process are cut, as text."""
    lines = []
    gathered = gathered_over(_parts_of(stages))
    for part in _parts_of(stages):
        _refuse_layers_of_others(part, gathered)
    for name, parameter in _named(stages):
        _refuse_foreign(host, name, processes_of(parameter), ["pp"])
        _refuse_foreign(host, name, gathered.get(parameter, []), ["pp", "tp"])
        lines.append(f"{name} {sharding_text(parameter)}, {parameter.dtype}, requires_grad={parameter.requires_grad}")
    return lines


def _refuse_foreign(host: ProcessCollectives, name: str, processes: Sequence[int], same: Sequence[str]) -> None:
    """Refuse a parameter cut over processes of which some are not in the mesh, or differ in one of these dimensions."""
    layout = host.layout
    here = layout.coordinates(host.process)
    for process in processes:
        number = layout.in_layout(process)
        if number is None:
            raise StagelineError(
                f"parallelize cut {name} over process {process}, which is not in the mesh of this pipeline; "
                "pass a mesh that holds it"
            )
        place = layout.coordinates(number)
        apart = next((dimension for dimension in same if place[dimension] != here[dimension]), None)
        if apart is not None:
            what = "has other stages" if apart == "pp" else "has the same samples, so gradients would count twice"
            raise StagelineError(
                f"parallelize cut {name} of {layout.name(host.process)} over {layout.name(number)}, which {what}; pass "
                'a part of the mesh that the function receives, such as fully_shard(part, mesh=mesh["dp_shard"])'
            )


def _refuse_layers_of_others(part: nn.Module, gathered: Collection[nn.Parameter]) -> None:
    """Refuse linear layers and embeddings of which processes with different samples compute different features."""
    for name, module in part.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if not is_sharded(parameter) or parameter in gathered or not isinstance(module, nn.Linear | nn.Embedding):
                continue
            axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
            apart = next(
                (axis for axis, placement in axes if axis in (*REPLICAS, *SHARDS) and placement.is_shard()), None
            )
            if apart is not None:
                raise StagelineError(
                    f"parallelize cut {name}.{own} over {apart}, whose processes have different samples, so their "
                    'features do not belong together; use mesh["tp"] for parallelize_module, and fully_shard '
                    f"for {apart}"
                )


def compare_ties(host: RankHost, stages: ModelStages) -> None:
    """Raise if ranks that use the same parameter cut it differently; those of a row call this together."""
    for parameter in stages.placed.scattered if stages.sharded else ():
        ranks = list(dict.fromkeys(use.rank for use in stages.placed.uses[parameter]))
        known = [host.broadcast(sharding_text(parameter), rank) for rank in ranks]
        odd = next((number for number, text in enumerate(known) if text != known[0]), None)
        if odd is not None:
            raise StagelineError(
                f"ranks {ranks[0]} and {ranks[odd]} use the parameter {stages.name_of(parameter)}; it {known[0]} on "
                f"rank {ranks[0]} and {known[odd]} on rank {ranks[odd]}: make parallelize cut both in the same way, "
                "or untie them"
            )


def common_seed(host: RankHost, seed: int | None) -> int:
    """The seed of the first process, on all processes: its last 52 bits, which are exact in a float."""
    if seed is not None and not isinstance(seed, int):
        raise StagelineError(f"seed must be an integer, got {shorten(seed)}")
    mine = (torch.initial_seed() if seed is None else seed) & (2**52 - 1)
    return int(host.all_gather(np.array([float(mine)]))[0, 0, 0])


def held_by_several(
    model: nn.Module, parts: Sequence[nn.Module], placement: Placement, replicas: int
) -> dict[str, tuple[Tensor, set[int]]]:
    """The parameters and buffers that more than one process holds, by name, with the ranks of a replica that do.

    >>> import stageline as sl
    >>> tied = nn.Linear(2, 2)
    >>> model = nn.Sequential(tied, nn.Linear(2, 2), tied)
    >>> placement = sl.schedule("gpipe", ranks=3, microbatches=1).placement
    >>> {name: ranks for name, (_, ranks) in held_by_several(model, list(model), placement, 1).items()}
    {'0.weight': {0, 2}, '0.bias': {0, 2}}
    """
    holders: dict[int, set[int]] = {}
    for stage, part in enumerate(parts):
        ranks = {int(rank) for rank in placement.table[:, stage]}
        for tensor in (*part.parameters(), *part.buffers()):
            holders.setdefault(id(tensor), set()).update(ranks)
    named = (*model.named_parameters(), *model.named_buffers())
    known = {name: (tensor, holders.get(id(tensor), set())) for name, tensor in named}
    return {name: (tensor, ranks) for name, (tensor, ranks) in known.items() if len(ranks) * replicas > 1}


def compare_weights(host: RankHost, stages: ModelStages, placement: Placement) -> None:
    """Raise the same error in all processes if two of them hold different values of one weight."""
    held = held_by_several(stages.model, stages.parts, placement, host.layout.replicas)
    if not held:
        return
    (rank,) = host.here
    own = [float(digest(local(tensor))) if rank in ranks else 0.0 for tensor, ranks in held.values()]
    keys = [_shard_key(host, tensor) if rank in ranks else 0.0 for tensor, ranks in held.values()]
    known, parts = np.split(host.all_gather(np.array([*own, *keys])), 2, axis=-1)
    for column, (name, (tensor, _)) in enumerate(held.items()):
        values = known[..., column]
        pairs = _different_holders(values, parts[..., column])
        if pairs:
            layout = host.layout
            first, second = (layout.rows[replica][at] for replica, at in pairs[0])
            mine = summarize(local(tensor)) if values[host.replica, rank] else ""
            one, other = (host.broadcast_to_all(mine, process) for process in (first, second))
            raise PipelineError(
                f"{layout.name(second)} and {layout.name(first)} hold different values of {name}, which both use: "
                f"{layout.name(second)} has {other} and {layout.name(first)} has {one}; start all with the same "
                "weights (one torch.manual_seed before the model is built, or one checkpoint); compare_weights=False "
                "skips this check"
            )


def _shard_key(host: RankHost, tensor: Tensor) -> float:
    """Which part of a tensor this process holds, as a number: processes with the same number hold the same part."""
    if not is_sharded(tensor):
        return 0.0
    place = 0
    for placement, size, at in zip(
        tensor.placements, tensor.device_mesh.shape, tensor.device_mesh.get_coordinate(), strict=True
    ):
        place = place * size + (0 if placement.is_replicate() else at)
    return float(place)


def _different_holders(values: Floats, parts: Floats) -> list[tuple[list[int], list[int]]]:
    """Pairs of places that hold the same part of a tensor with different values.

    >>> _different_holders(np.array([[5.0, 0], [6, 0]]), np.zeros((2, 2)))
    [([0, 0], [1, 0])]
    >>> _different_holders(np.array([[5.0, 0], [6, 0]]), np.array([[0.0, 0], [1, 0]]))
    []
    """
    first: dict[float, list[int]] = {}
    pairs: list[tuple[list[int], list[int]]] = []
    for place in np.argwhere(values).tolist():
        known = first.setdefault(float(parts[tuple(place)]), place)
        if values[tuple(place)] != values[tuple(known)]:
            pairs.append((known, place))
    return pairs


def summarize(tensor: Tensor) -> str:
    """A short text that distinguishes a tensor from others of its shape.

    >>> summarize(torch.ones(2))
    '[1.0, 1.0], sum 2.0'
    """
    flat = tensor.detach().reshape(-1)
    shown = ", ".join(str(round(value, 6)) if isinstance(value, float) else str(value) for value in flat[:3].tolist())
    total = flat.sum(dtype=torch.float64) if flat.is_floating_point() else flat.sum()
    return f"[{shown}{', …' if flat.numel() > 3 else ''}], sum {total.item()}"
