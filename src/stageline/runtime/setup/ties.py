"""Tied parameters that are sharded: `fully_shard` and `parallelize_module` make two of them, and here they become one.

The stages of one process then use one sharded parameter: gradients of all uses add into its `.grad`, and an optimizer
has it once. Each stage gathers it for itself. Where other ranks use it, too, they have it once each, and
`shared_parameters` sums the gradients of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from torch import nn

from stageline.common.errors import StagelineError
from stageline.runtime._torch_private import parameters_of, share_shard
from stageline.tensors.sharded import is_sharded, sharding_text


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several.

    >>> layer = nn.Linear(2, 2)
    >>> tied_names(nn.Sequential(layer, nn.Tanh(), layer))
    [['0.weight', '2.weight'], ['0.bias', '2.bias']]
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def tie_again(
    model: nn.Module, own: Sequence[nn.Module], others: Iterable[nn.Module], tied: Sequence[Sequence[str]]
) -> None:
    """Make the parameters with these names one again: in the stages that this process has, and in all others.

    Those of one process must be cut in the same way.
    """
    here: dict[str, tuple[nn.Module, str]] = {}
    for part in own:
        for name, _ in part.named_parameters(remove_duplicate=False):
            path, _, attribute = name.rpartition(".")
            here[name] = part.get_submodule(path), attribute
    for names in tied:
        mine = [name for name in names if name in here]
        values = [parameters_of(here[name][0])[here[name][1]] for name in mine]
        if not any(map(is_sharded, values)):
            continue
        first = values[0]
        assert first is not None
        for name, value in zip(mine[1:], values[1:], strict=True):
            assert value is not None
            if sharding_text(value) != sharding_text(first):
                raise StagelineError(
                    f"{mine[0]} and {name} are one parameter; {mine[0]} {sharding_text(first)} and {name} "
                    f"{sharding_text(value)}: let parallelize cut both in the same way, or untie them"
                )
            if value is not first:
                share_shard(own, here[mine[0]], here[name])
        for root in (model, *own, *others):
            for name in names:
                path, _, attribute = name.rpartition(".")
                with suppress(AttributeError):  # another stage's
                    parameters = parameters_of(root.get_submodule(path))
                    if attribute in parameters:
                        parameters[attribute] = first
