"""The `compile` option: from what a user passes to the keyword arguments of torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from stageline.autograd._torch_private import raise_recompile_limit
from stageline.common.errors import StagelineError, shorten

Compile = bool | str | Mapping[str, Any]
"""Whether to compile, the name of a backend, or keyword arguments of torch.compile."""

GRAPHS = "graphs"
"""The backend that runs captured graphs operator by operator."""

RECOMPILATIONS = 8
"""How often torch compiles the code of a class, by default."""

SPLIT_BACKENDS = (GRAPHS, "inductor")
"""The backends whose backward runs in two halves where the schedule splits it."""


def compile_options(option: Compile, *, split: bool) -> dict[str, Any] | None:
    """The keyword arguments of torch.compile; None if nothing is compiled.

    If the schedule splits the backward (`split`), inductor compiles its two halves separately. Backends other than
    `SPLIT_BACKENDS` compile a backward as a whole: then weight gradients are computed in I, not in W.

    >>> compile_options("aot_eager", split=True)
    {'backend': 'aot_eager'}
    >>> compile_options(False, split=True) is None
    True
    """
    if not isinstance(option, bool | str | Mapping):
        raise StagelineError(
            "compile is True, the name of a backend or a dict of torch.compile's keyword arguments, "
            f"got {shorten(option)}"
        )
    if option is False:
        return None
    options: dict[str, Any] = {} if option is True else {"backend": option} if isinstance(option, str) else dict(option)
    backend = options.get("backend", "inductor")
    _check(option, {**options, "backend": "eager"} if backend == GRAPHS else options)
    if backend in SPLIT_BACKENDS and (split or backend == GRAPHS):
        options["backend"] = _split_backend(backend)
    return options


def _check(option: Compile, options: Mapping[str, Any]) -> None:
    try:
        with warnings.catch_warnings():  # of imports of torch's own code
            warnings.simplefilter("ignore")
            torch.compile(lambda: None, **options)  # checks its arguments at once, and compiles nothing before a call
    except Exception as error:  # TypeError, RuntimeError or an exception of torch's compiler
        reason = next(iter(str(error).splitlines()), "")
        raise StagelineError(f"compile={shorten(option)} is not accepted by torch.compile: {reason}") from error


def allow_forms(modules: Iterable[nn.Module]) -> None:
    """Let torch compile every form of a unit as often as it compiles one.

    torch limits how often the code of one class is compiled; beyond that, units would run as they are. Units of one
    class differ in their form: in the shapes of their parameters, or in attributes such as the number of a layer.

    >>> with torch._dynamo.config.patch(recompile_limit=8):
    ...     allow_forms([nn.Linear(2, width) for width in range(1, 3)])
    ...     print(torch._dynamo.config.recompile_limit)
    16
    """
    forms: dict[type, set[Any]] = {}
    for module in modules:
        forms.setdefault(type(module), set()).add(_form(module))
    most = max(map(len, forms.values()), default=0)
    if most > 1:
        raise_recompile_limit(RECOMPILATIONS * most)


def _form(module: nn.Module) -> Any:
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters())
    attributes = ((name, key, value) for name, part in module.named_modules() for key, value in vars(part).items())
    return parameters, tuple(item for item in attributes if isinstance(item[2], bool | int | float | str))


@cache
def _split_backend(compiler: Any) -> Any:
    """The backend of this process: units share their compiled graphs if their backends are the same object."""
    from stageline.autograd.graphs.backend import GraphBackend  # imports torch's compiler, which takes seconds

    return GraphBackend(compiler, warnings.warn)
