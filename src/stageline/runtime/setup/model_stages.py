"""A model in stages: those of this process, compiled if requested, on its ranks; and the owner of every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stageline.autograd.engine import registered_hooks
from stageline.autograd.graphs.options import Compile, allow_forms, compile_options
from stageline.common.errors import StagelineError
from stageline.distributed.rank_host import RankHost
from stageline.model.build.build import Description
from stageline.model.compiled_models import any_compiled
from stageline.model.split import Staged
from stageline.model.stage_module.shared_state import SharedState
from stageline.model.stage_module.stage_module import StagePart
from stageline.model.units import NoStack, layers_of
from stageline.runtime._torch_private import compile_forward, has_gradient_hooks, sharded_by_fsdp
from stageline.runtime.guards.cut_layers import refuse_mixed_optimizers
from stageline.runtime.guards.foreign_reads import holders_of, readers
from stageline.runtime.setup.parallelize import Parallelize, apply, materialise_sharded, names_of_several, tie_again
from stageline.runtime.setup.stages import beside, cut
from stageline.runtime.shared_parameters import Placed, place_stages
from stageline.schedules.placement import Placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def watched_layers(part: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """What may share state with other stages: the layers of a stage, or its units as the model holds them."""
    return part.own_units() if isinstance(part, StagePart) else layers_of(part)


class ModelStages:
    """The stages of a model, by the placement of a schedule.

    A model whose forward shows its order of calls only in a batch is cut by the first one: `awaits_batch` until then.
    """

    shared_state: SharedState
    """The state that several stages share."""
    readers: frozenset[int]
    """The stages that can reach parameters of others through plain references."""
    placed: Placed
    """The modules of the ranks of this process."""
    sharded: bool = False
    """Whether `parallelize` was applied to the stages."""
    mesh: DeviceMesh | None = None
    """The processes that hold the same stages: the mesh without "pp"."""
    plain: bool
    """Whether every stage runs once, on its own module: no parameter has two uses."""
    _hooks: int | None = None
    """How many hooks were registered when those of parameters were last checked."""

    def __init__(self, source: Any, model: nn.Module, stages: int, example: Any) -> None:
        """Cut the model, or keep the reason why only an example can show where to cut."""
        self.model = model
        self.exact = not isinstance(source, nn.Module | Staged)
        """Whether the user passed stages, not a model to cut."""
        self._source, self._count, self._example = source, stages, example
        own_forward = isinstance(source, nn.Module) and not isinstance(source, nn.Sequential)
        self.awaits_batch = example is None and own_forward
        self._cut, self.parts, self._not_cut = source, list[nn.Sequential](), None
        try:
            self._cut, self.parts = cut(source, model, stages, example)
        except NoStack as error:
            self._not_cut = error
        self._defined: list[nn.Sequential] = []
        """The stages in the order of definition, if the first batch showed a different order."""

    def join(self, host: RankHost, placement: Placement, *, parallelized: bool = False) -> None:
        """Find the stages of this process. Processes must know immediately which parameters they own.

        `parallelized` says whether a function is applied to the stages, which must exist then.
        """
        self.here, self._placement = host.here, placement
        self.awaits_batch = self.awaits_batch and host.single_process and not parallelized
        if self._not_cut is not None and not self.awaits_batch:
            raise self._not_cut

    def build(
        self,
        recipe: Description[Any] | None,
        seed: int,
        device: torch.device | str,
        parallelize: Parallelize | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Give memory and weights to the tensors of this process's stages, if the model was built without memory.

        `parallelize` is applied to them before that, so that a process allocates only its part of a sharded parameter.
        """
        self.sharded, self.mesh = parallelize is not None, mesh
        if recipe is not None:
            parts: list[nn.Module] = [part for stage, part in enumerate(self.parts) if self.holds(stage)]
            chosen = parts or [self.model]
            if parallelize is not None:  # the parts hold buffers, so they are cut when these exist
                local = {name for part in chosen for name, _ in part.named_buffers(remove_duplicate=False)}
            else:
                local = {name for part in chosen for name, _ in named_tensors(part)}
            recipe.materialise(local.__contains__, seed=seed, device=device)
            if self._not_cut is None:
                _, self.parts = cut(self._cut, self.model, self._count, self._example)
        if parallelize is not None:
            own = [(stage, part) for stage, part in enumerate(self.parts) if self.holds(stage)]
            several = names_of_several(self.model, self.parts)
            apply(parallelize, own, mesh)
            if recipe is not None:
                materialise_sharded(recipe, [part for _, part in own], seed, device)
            others = [part for stage, part in enumerate(self.parts) if not self.holds(stage)]
            tie_again(self.model, [part for _, part in own], others, several)
            refuse_mixed_optimizers(named for _, part in own for named in part.named_parameters())

    def place(self, compile_: Compile, *, split: bool = False) -> None:
        """Compile the stages of this process, and give each of its ranks the modules of its stages.

        `split` says whether the schedule splits the backward.
        """
        self._compile, self._split = compile_, split
        if compile_ is not False and not self.awaits_batch:
            own = (part for stage, part in enumerate(self.parts) if self.holds(stage))
            compile_units(own, compile_, split=split, sharded=self.sharded)
        self.compiled = compile_ is not False or any_compiled(self.parts)
        layers = [watched_layers(part) for part in self.parts]
        self.shared_state = SharedState.of(layers)
        self.readers = readers(self.parts, layers, [stage for stage in range(len(layers)) if self.holds(stage)])
        holders = [*self.shared_state.holders(), *(holders_of(self.parts) if self.readers else ())]
        self.placed = place_stages(self.parts, self._placement, self.here, holders, sharded=self.sharded)
        modules = (item for by_stage in self.placed.modules.values() for item in by_stage.items())
        self.plain = not self.placed.uses and all(module is self.parts[stage] for stage, module in modules)
        for name in ("local", "owners"):
            self.__dict__.pop(name, None)

    # The first batch.

    def cut_by(self, microbatch: Any) -> None:
        """Cut the model by the first microbatch, which shows the order of the model's calls."""
        defined = parts = self.parts
        try:
            _, parts = cut(self._source, self.model, self._count, beside(self.model, microbatch))
        except Exception:  # the model may fail on it in any way
            if not defined:
                raise
        self._cut_again(parts, awaits_batch=False)
        self._defined = defined

    def forget_batch(self) -> None:
        """Wait for the first batch again: the batch by which the model was cut has failed."""
        self._cut_again(self._defined, awaits_batch=True)

    def _cut_again(self, parts: list[nn.Sequential], *, awaits_batch: bool) -> None:
        compiled = getattr(self, "compiled", False)
        self.parts, self.awaits_batch = parts, awaits_batch
        self.place(self._compile, split=self._split)
        self.compiled = self.compiled or compiled

    def refuse_to_train(self) -> None:
        """Refuse running statistics that two stages would update."""
        if not self.awaits_batch and self.shared_state.norms:
            self.shared_state.refuse_norms()

    def refuse_hooks(self) -> None:
        """Refuse hooks of gradients that FSDP2 would not call: it computes those of gathered parameters."""
        if self._hooks != registered_hooks():
            self._hooks = registered_hooks()
            sharded = sharded_by_fsdp(self.local_parts())
            for name, parameter in self.named_parameters():
                if parameter in sharded and has_gradient_hooks(parameter):
                    raise StagelineError(
                        f"the parameter {name} has a hook, but FSDP2 shards it and computes gradients of the "
                        "gathered parameter, which has no hook; use register_post_accumulate_grad_hook, "
                        "which is called once a step with the reduced gradient"
                    )

    # What is here, and whose it is.

    def holds(self, stage: int) -> bool:
        """Whether a rank of this process runs the stage."""
        return bool(set(self._placement.table[:, stage].tolist()) & set(self.here))

    @cached_property
    def local(self) -> set[int]:
        """The stages whose weights are in this process."""
        return {stage for stages in self.placed.modules.values() for stage in stages}

    def own_parts(self) -> dict[int, nn.Module]:
        """The stages of this process by their numbers."""
        return {stage: part for stage, part in enumerate(self.parts) if stage in self.local}

    def local_parts(self) -> Iterator[nn.Module]:
        """The stages of this process; the whole model while it awaits its first batch uncut."""
        if not self.parts:
            return iter([self.model])
        return (part for stage, part in enumerate(self.parts) if stage in self.local)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process's stages, by their names in the whole model."""
        local = {parameter for part in self.local_parts() for parameter in part.parameters()}
        return ((name, parameter) for name, parameter in self.model.named_parameters() if parameter in local)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this process's stages, by their names in the whole model."""
        local = {name: buffer for part in self.local_parts() for name, buffer in part.named_buffers()}
        order = (name for name, _ in self.model.named_buffers())
        return iter({name: local[name] for name in (*order, *local) if name in local}.items())

    def state_dict(self) -> dict[str, Any]:
        """The state of this process's stages, in the order of the whole model."""
        local = {name: value for part in self.local_parts() for name, value in part.state_dict().items()}
        return {name: local[name] for name in (*self.model.state_dict(), *local) if name in local}

    @cached_property
    def owners(self) -> dict[str, int]:
        """The rank that each parameter and buffer belongs to: the first that uses it."""
        owners: dict[str, int] = {}
        for part, rank in zip(self.parts, self._placement.table[0].tolist(), strict=False):
            for name, _ in named_tensors(part):
                owners.setdefault(name, rank)
        first = {parameter: uses[0].rank for parameter, uses in self.placed.uses.items()}
        named = self.model.named_parameters()
        return owners | {name: first[parameter] for name, parameter in named if parameter in first}

    def owns(self, name: str) -> bool:
        """Whether a parameter or buffer belongs to a rank of this process."""
        return not self.parts or self.owners.get(name) in self.here

    def name_of(self, parameter: nn.Parameter) -> str:
        """The name of a parameter in the whole model."""
        return next((name for name, own in self.model.named_parameters() if own is parameter), "without a name")


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers of a model, tied ones by each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def compile_units(
    parts: Iterable[nn.Sequential], option: Compile, *, split: bool = False, sharded: bool = False
) -> None:
    """Compile each layer of the stages, or each unit of a model with its own forward, separately.

    The code between the units, and names, hooks and state dicts, do not change. Hooks of `sharded` units are not
    compiled.

    >>> import torch
    >>> part = nn.Sequential(nn.Linear(2, 2))
    >>> compile_units([part], {"backend": "eager"})
    >>> part(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    options = compile_options(option, split=split)
    if options is not None:
        layers = (module for part in parts for _, module in watched_layers(part))
        units = [module for module in layers if any(True for _ in module.parameters())]
        allow_forms(units)
        for unit in units:
            if sharded:
                compile_forward(unit, **options)
            else:
                unit.compile(**options)
