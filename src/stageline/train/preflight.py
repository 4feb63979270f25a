"""Check a job before it starts: everything that needs no measuring, training or writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import nn

from stageline.autograd.recompute import parse_recompute
from stageline.common.errors import StagelineError
from stageline.distributed.bootstrap import check_environment
from stageline.model.build.build import describe
from stageline.model.split import split
from stageline.model.tp_plan import plan_of
from stageline.train.checkpoint.reader import at_step
from stageline.train.checkpoint.remote import checkpoint_folder, location
from stageline.train.config.config import Config
from stageline.train.config.io import raise_errors
from stageline.train.config.ranks import count_gpus, find_degrees
from stageline.train.config.rules import too_few_units
from stageline.train.layout import JobLayout, find_job_layout
from stageline.train.run_folder import RunFolder
from stageline.train.setup import Setup


def preflight(config: Config) -> None:
    """Raise what a run of a valid config would raise before its first step, with a line for each reason.

    >>> preflight(Config.read(None, "job.dump_folder=nowhere"))
    >>> preflight(Config.read(None, "model.vocab_size=100"))
    Traceback (most recent call last):
    ...
    stageline.StagelineError: model.vocab_size is 100, but the tokenizer bytes has 256 tokens; set it to
    0 to use that size
    """
    setup = Setup(config, _layout(config), RunFolder(config.job.dump_folder))
    sentences = []
    for check in (_folder, _job):
        try:
            sentences += list(check(setup))
        except StagelineError as error:
            sentences.append(str(error))
    raise_errors(sentences)


def _layout(config: Config) -> JobLayout:
    """Return the layout of the running processes; a single one checks for all that will be started."""
    if check_environment(os.environ) > 1:
        return find_job_layout(config)
    ranks, replicas, shards, tensors = find_degrees(config.parallelism, 1, count_gpus())
    return JobLayout(ranks, replicas * shards, 1, 0, torch.device("cpu"), shards, tensors)


def _folder(setup: Setup) -> Iterator[str]:
    """Check the folder of the run, and the checkpoints to load."""
    config, folder = setup.config, setup.folder
    folder.find_run(config)
    options = config.checkpoint
    if options.load_step >= 0:
        at_step(checkpoint_folder(folder.path, options.folder), options.load_step)
    if options.initial_load_path and not location(options.initial_load_path).exists():
        yield f"checkpoint.initial_load_path is {options.initial_load_path!r}, which does not exist"


def _job(setup: Setup) -> Iterator[str]:
    """Check data, model and loss, with parameters on the meta device."""
    setup.open_data()
    model = _model(setup)
    _ = setup.task.loss
    if model is None:
        return
    if setup.layout.tensors > 1 and not plan_of(model):
        yield (
            f"parallelism.tensor_parallel_degree is {setup.layout.tensors}, and {type(model).__name__} has no "
            "tp_plan, which defines how its layers are split; add one, or set the degree to 1"
        )
    units = _units(model, setup)
    if units is not None:
        yield from too_few_units(setup.config, units, f"{setup.task.name} has {units}")
    recompute = setup.config.activation_checkpoint
    chosen = parse_recompute(list(recompute.modules), None).chosen if recompute.mode == "selective" else None
    named = [(name, module) for name, module in model.named_modules() if name]
    if chosen is not None and not any(chosen(name, module) for name, module in named):
        first = ", ".join(name for name, _ in named[:4])
        yield (
            f"activation_checkpoint.modules is {', '.join(recompute.modules)}, which matches no module of the model; "
            f"the first names are {first}"
        )


def _model(setup: Setup) -> nn.Module | None:
    """Return the model on the meta device; None if only a run can build it."""
    with suppress(Exception):  # a constructor that reads values cannot run on the meta device
        return describe(setup.task.make).model
    return None


def _units(model: nn.Module, setup: Setup) -> int | None:
    """Return the number of units of the model; None if only a run can tell."""
    for example in (setup.example, None):  # a model on the meta device cannot always run
        with suppress(Exception):
            return len(split(model, 1, example=example).units)
    return None
