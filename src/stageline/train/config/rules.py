"""Rules that no single option can check: whether options can be combined, and whether the files they name exist."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePath

from stageline.common.errors import JsonError, StagelineError, nearest
from stageline.common.imports import is_hub_name
from stageline.distributed.recovery_policy import action_errors
from stageline.schedules.io import read_schedule
from stageline.schedules.registry import find_family, schedule
from stageline.schedules.schedule import Schedule
from stageline.train.config.config import Config, Parallelism
from stageline.train.config.io import options, raise_errors, show, toml_value
from stageline.train.config.ranks import SHARDS, TENSORS, degree_errors, ranks_of_job

LOSSES = ("cross_entropy", "weighted_cross_entropy", "mse", "own")
DATASETS = ("python", "text", "memmap", "dataset")
GPT_UNITS = 4
"""Units of the built-in GPT beside its blocks: two embeddings, the last norm, the head."""
SEARCH_DISTANCE = 10_000
"""How far from a number to search for a divisor to suggest."""


def validate(config: Config) -> None:
    """Raise an error with one line for each problem if the config cannot run.

    >>> validate(Config())
    >>> validate(Config.read(None, "model.dim=100", "model.n_heads=8"))
    Traceback (most recent call last):
    ...
    stageline.StagelineError: model.dim is 100, which is not a multiple of model.n_heads 8;
        use 96 or 104 for model.dim, or 5 or 10 for model.n_heads
    """
    raise_errors(find_errors(config))


def find_errors(config: Config) -> list[str]:
    """Return everything that is wrong with a config, one sentence each."""
    return list(_value_errors(config)) or [error for rule in RULES for error in rule(config)]


def _value_errors(config: Config) -> Iterator[str]:
    """Values of a wrong type or out of bounds, which Python can assign but no file can contain."""
    for option in options().values():
        try:
            option.accept(option.get(config))
        except JsonError as error:
            yield f"{error}; for example {toml_value(option.sample)}"


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if model.name == "gpt" and model.dim % model.n_heads:
        yield (
            f"model.dim is {model.dim}, which is not a multiple of model.n_heads {model.n_heads}; use "
            f"{multiples(model.dim, model.n_heads)} for model.dim, or {divisors(model.dim, model.n_heads)} for "
            "model.n_heads"
        )
    if model.name != "gpt" and ":" not in model.name:
        yield from _hugging_face(Path(model.name))
    if model.tokenizer_path not in TOKENIZERS and not os.path.isfile(model.tokenizer_path):
        yield (
            f"model.tokenizer_path is {show(model.tokenizer_path)}, which does not exist; use a tokenizer.json, or "
            f"{', '.join(TOKENIZERS)}{nearest(model.tokenizer_path, TOKENIZERS)}"
        )


def _hugging_face(path: Path) -> Iterator[str]:
    shown, file = show(str(path)), path / "config.json" if os.path.isdir(path) else path
    if not os.path.isfile(file):
        if not is_hub_name(str(path)):
            yield (
                f"model.name is {shown}; it must be gpt{nearest(str(path), ['gpt'])}, an existing config.json, a "
                "folder that contains one, a model on the Hugging Face hub (owner/name), "
                "or package.module:function"
            )
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"model.name is {shown}, but {file} is not valid JSON: {error}"
        return
    if not isinstance(content, dict) or "model_type" not in content:
        yield f"model.name is {shown}, but {file} has no model_type, so it is not a Hugging Face config"


def dataset_errors(config: Config) -> Iterator[str]:
    """Check the kind of the training data, and whether it has a path."""
    training = config.training
    if ":" not in training.dataset and training.dataset not in DATASETS:
        yield (
            f"training.dataset is {show(training.dataset)}; it must be one of {', '.join(DATASETS)}"
            f"{nearest(training.dataset, DATASETS)}, or package.module:function"
        )
    if training.dataset in ("text", "memmap", "dataset") and not training.dataset_path:
        yield (
            f"training.dataset is {training.dataset}, but training.dataset_path is empty; set it, for example "
            "training.dataset_path=data/train.txt"
        )
    if training.dataset == "python" and training.dataset_path:
        yield (
            "training.dataset is python, which needs no path, but training.dataset_path is "
            f"{show(training.dataset_path)}; for your own files, set training.dataset to text, memmap or dataset"
        )


def _data(config: Config) -> Iterator[str]:
    training, validation = config.training, config.validation
    yield from dataset_errors(config)
    paths = {"training.dataset_path": training.dataset_path, "validation.dataset_path": validation.dataset_path}
    for key, names in paths.items() if ":" not in training.dataset else ():
        for name in filter(None, map(str.strip, names.split(","))):
            if not os.path.exists(name):
                yield f"{key} contains {show(name)}, which does not exist"
    if validation.dataset_path and not validation.enable:
        yield (
            f"validation.dataset_path is {show(validation.dataset_path)}, but validation.enable is false; enable "
            "validation, or remove the path"
        )


def _folders(config: Config) -> Iterator[str]:
    folders = {
        "checkpoint.folder": config.checkpoint.folder,
        "metrics.save_tb_folder": config.metrics.save_tb_folder,
    }
    for key, name in folders.items():
        if key == "checkpoint.folder" and "://" in name:
            continue
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            url = ", or a URL such as s3://bucket/run" if key == "checkpoint.folder" else ""
            yield f"{key} is {show(name)}; it must be the name of a folder inside job.dump_folder{url}"
    if not config.job.dump_folder:
        yield "job.dump_folder is empty; set a folder, for example outputs"


def _patience(config: Config) -> Iterator[str]:
    if config.validation.patience and not config.validation.enable:
        yield (
            f"validation.patience is {config.validation.patience}, but validation.enable is false; enable validation, "
            "or set the patience to 0"
        )


def _loss(config: Config) -> Iterator[str]:
    training = config.training
    if ":" not in training.loss and training.loss not in LOSSES:
        yield (
            f"training.loss is {show(training.loss)}; it must be one of {', '.join(LOSSES)}"
            f"{nearest(training.loss, LOSSES)}, or package.module:function"
        )
    is_weighted = training.loss == "weighted_cross_entropy"
    if is_weighted and not training.loss_weights:
        yield (
            "training.loss is weighted_cross_entropy, but training.loss_weights is empty; set one weight per class, "
            "for example training.loss_weights=1.0,0.5, or use cross_entropy"
        )
    if not is_weighted and training.loss_weights:
        yield (
            f"training.loss_weights has {len(training.loss_weights)} weights, but training.loss is {training.loss}, "
            "which does not use them; use weighted_cross_entropy, or remove the weights"
        )


def _batch(config: Config) -> Iterator[str]:
    local, size = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    if local % size:
        yield (
            f"parallelism.pipeline_parallel_microbatch_size is {size}, which does not divide training.local_batch_size "
            f"{local}; use {divisors(local, size)} for the microbatch, or {multiples(local, size)} for the local batch"
        )
    replicas, whole = config.parallelism.data_parallel_replicate_degree, config.training.global_batch_size
    shards = config.parallelism.data_parallel_shard_degree
    at_once = local * max(1, replicas) * max(1, shards)
    if whole % at_once:
        times = f" × {replicas} replicas (parallelism.data_parallel_replicate_degree)" if replicas > 1 else ""
        times += f" × {shards} shards (parallelism.data_parallel_shard_degree)" if shards > 1 else ""
        yield (
            f"training.global_batch_size is {whole}, which is not a multiple of training.local_batch_size "
            f"{local}{times}; use {multiples(whole, at_once)}, or 0 for one local batch per replica"
        )


def _degrees(config: Config) -> Iterator[str]:
    yield from degree_errors(config.parallelism)
    degree, heads = config.parallelism.tensor_parallel_degree, config.model.n_heads
    if config.model.name == "gpt" and degree > 1 and heads % degree:
        yield (
            f"parallelism.tensor_parallel_degree is {degree}, which does not divide model.n_heads {heads}; use "
            f"{divisors(heads, degree)} for the degree, or {multiples(heads, degree)} for model.n_heads"
        )


def _shards(config: Config) -> Iterator[str]:
    obstacles = {
        "compile.cuda_graphs is true": config.compile.cuda_graphs,
        "training.continuous_steps is true": config.training.continuous_steps,
        "optimizer.name is Muon": config.optimizer.name == "Muon",
        "optimizer.name is Adafactor": config.optimizer.name == "Adafactor",
        "optimizer.implementation is fused and optimizer.name is SGD": config.optimizer.name == "SGD"
        and config.optimizer.implementation == "fused",
        "checkpoint.initial_load_path is set": config.checkpoint.initial_load_path,
    }
    for name in (SHARDS, TENSORS):
        degree = getattr(config.parallelism, name)
        compiled = {"compile.enable is true": name == TENSORS and config.compile.enable}
        for obstacle, is_present in (compiled | obstacles).items():
            if degree not in (0, 1) and is_present:
                yield (
                    f"parallelism.{name} is {degree}, but {obstacle}, which sharded stages do not support; change "
                    "one of the two"
                )


def _continuous_steps(config: Config) -> Iterator[str]:
    training = config.training
    obstacles = {
        f"training.dtype is {training.dtype}": training.dtype != "float32",
        "training.mixed_precision_param is float16": training.mixed_precision_param == "float16",
        "optimizer.name is Muon": config.optimizer.name == "Muon",
    }
    for obstacle, is_present in obstacles.items():
        if training.continuous_steps and is_present:
            yield f"training.continuous_steps is true, but {obstacle}; change one of the two"


def _learning_rate(config: Config) -> Iterator[str]:
    steps, ratio, warmup = config.training.steps, config.lr_scheduler.decay_ratio, config.lr_scheduler.warmup_steps
    if -1 < ratio < 0:
        yield f"lr_scheduler.decay_ratio is {ratio}; it must be -1, or a fraction of the steps from 0 to 1"
    decay = round(ratio * steps)
    if ratio > 0 and warmup + decay > steps:
        longer = f", or at least {math.ceil(warmup / (1 - ratio)) + 1} steps" if ratio < 1 else ""
        yield (
            f"lr_scheduler.warmup_steps is {warmup} and lr_scheduler.decay_ratio is {ratio} ({decay} steps), which "
            f"together exceed training.steps {steps}; use at most {steps - decay} warm-up steps{longer}"
        )


def _recompute(config: Config) -> Iterator[str]:
    recompute = config.activation_checkpoint
    if recompute.mode == "selective" and not recompute.modules:
        yield (
            "activation_checkpoint.mode is selective, but activation_checkpoint.modules is empty; name modules, for "
            "example activation_checkpoint.modules=blocks.*.mlp, or use full"
        )
    if recompute.mode != "selective" and recompute.modules:
        yield (
            f"activation_checkpoint.modules is {show(recompute.modules)}, but activation_checkpoint.mode is "
            f"{recompute.mode}; use selective, or remove the modules"
        )


def fixed_schedule(options: Parallelism, ranks: int, microbatches: int) -> Schedule | None:
    """Return the schedule that a config names; None for "auto"."""
    if options.pipeline_parallel_schedule_csv:
        return read_schedule(options.pipeline_parallel_schedule_csv)
    if options.pipeline_parallel_schedule.lower() == "auto":
        return None
    chunks = {"chunks": options.pipeline_parallel_chunks} if options.pipeline_parallel_chunks else {}
    return schedule(options.pipeline_parallel_schedule, ranks, microbatches, **chunks)


def _schedule(config: Config) -> Iterator[str]:
    layout, local, key = config.parallelism, config.training.local_batch_size, "parallelism.pipeline_parallel_schedule"
    name, ranks = layout.pipeline_parallel_schedule, ranks_of_job(layout)
    size = layout.pipeline_parallel_microbatch_size
    if layout.pipeline_parallel_schedule_csv:
        yield from _schedule_file(layout, local)
        return
    if name.lower() == "auto":
        return
    try:
        family = find_family(name)
    except StagelineError as error:
        yield f"{key} is {show(name)}: {error}; or use auto"
        return
    if layout.pipeline_parallel_chunks and "chunks" not in family.options:
        yield (
            f"parallelism.pipeline_parallel_chunks is {layout.pipeline_parallel_chunks}, but {key} is {name}, which "
            "has no option for chunks; use 0, or a family with chunks, for example interleaved"
        )
    elif local % size == 0:
        try:
            fixed = fixed_schedule(layout, ranks, local // size)
            if fixed is not None and not fixed.training:
                yield f"{key} is {name}, which is for inference only; use a family that trains, or auto"
        except StagelineError as error:
            yield (
                f"{key} is {name}, with parallelism.pipeline_parallel_degree {ranks} and {local // size} microbatches "
                f"(training.local_batch_size {local} / parallelism.pipeline_parallel_microbatch_size {size}): {error}"
            )


def _schedule_file(layout: Parallelism, local: int) -> Iterator[str]:
    file, name = layout.pipeline_parallel_schedule_csv, layout.pipeline_parallel_schedule
    ranks, size = ranks_of_job(layout), layout.pipeline_parallel_microbatch_size
    problem = f"parallelism.pipeline_parallel_schedule_csv is {show(file)}"
    if name.lower() != "auto":
        yield f"{problem}, but parallelism.pipeline_parallel_schedule is {name}; set only one of them"
    try:
        plan = read_schedule(file)
    except StagelineError as error:
        yield f"{problem}: {error}"
        return
    if plan.ranks != ranks:
        yield (
            f"{problem}, a schedule for {plan.ranks} ranks, but parallelism.pipeline_parallel_degree is {ranks}; use "
            f"{plan.ranks}"
        )
    if local % size == 0 and plan.microbatches != local // size:
        yield (
            f"{problem}, a schedule for {plan.microbatches} microbatches, but training.local_batch_size {local} / "
            f"parallelism.pipeline_parallel_microbatch_size {size} is {local // size}; use "
            f"{plan.microbatches * size} for the local batch"
        )


def _units(config: Config) -> Iterator[str]:
    if config.model.name == "gpt":  # its units are known without building it
        units = config.model.n_layers + GPT_UNITS
        yield from too_few_units(config, units, f"with model.n_layers {config.model.n_layers}, there are {units}")


def too_few_units(config: Config, units: int, reason: str) -> Iterator[str]:
    """Check that a model with this many units can be split into the stages of the config; `reason` explains it."""
    layout, local = config.parallelism, config.training.local_batch_size
    ranks, chunks = ranks_of_job(layout), layout.pipeline_parallel_chunks
    stages = ranks * max(1, chunks)
    cause = f" and parallelism.pipeline_parallel_chunks is {chunks}" if chunks else ""
    with suppress(StagelineError):  # `_schedule` reports what is wrong with the schedule itself
        fixed = fixed_schedule(layout, ranks, max(1, local // layout.pipeline_parallel_microbatch_size))
        if fixed is not None:
            stages = fixed.stages
            cause += f" and parallelism.pipeline_parallel_schedule is {layout.pipeline_parallel_schedule}"
        if layout.pipeline_parallel_schedule_csv:
            cause = f" and parallelism.pipeline_parallel_schedule_csv is {show(layout.pipeline_parallel_schedule_csv)}"
    if stages > units:
        most = units // max(1, stages // ranks)
        fewer = f"use at most {most} ranks" if most else "use fewer chunks, or another schedule"
        yield (
            f"parallelism.pipeline_parallel_degree is {ranks}{cause}, which makes {stages} stages, but every stage "
            f"needs a unit of the model: {reason}; {fewer}, or a model with at least {stages} units"
        )


TOKENIZERS = ("auto", "bytes", "python")
"""The built-in tokenizers."""
ConfigRule = Callable[[Config], Iterator[str]]


def _recovery(config: Config) -> Iterator[str]:
    recovery = config.recovery
    yield from (f"recovery.on_loss {error}" for error in action_errors(recovery.on_loss))
    if recovery.spares and not recovery.max_restarts:
        yield (
            f"recovery.spares is {recovery.spares}, but spare processes are used only if recovery.max_restarts is "
            "above 0; it is 0"
        )


RULES: tuple[ConfigRule, ...] = (
    _folders,
    _model,
    _data,
    _patience,
    _loss,
    _batch,
    _degrees,
    _shards,
    _continuous_steps,
    _learning_rate,
    _recompute,
    _schedule,
    _units,
    _recovery,
)


def needs_no_preflight(config: Config) -> bool:
    """Whether `validate` checks everything that can be checked without opening files or building a model.

    >>> needs_no_preflight(Config()), needs_no_preflight(Config.read(None, "model.name=package:function"))
    (True, False)
    """
    built_in = config.model.name == "gpt" and config.model.tokenizer_path in TOKENIZERS and not config.model.vocab_size
    plain = config.training.dataset == "python" and config.training.loss == "cross_entropy"
    new = not os.path.exists(config.job.dump_folder) and not config.checkpoint.initial_load_path
    selects = config.activation_checkpoint.mode == "selective" or config.checkpoint.load_step >= 0
    validates = config.validation.patience or config.validation.dataset_path
    pipelined = config.parallelism.tensor_parallel_degree <= 1
    started = "WORLD_SIZE" in os.environ
    return bool(built_in and plain and new and pipelined and not selects and not validates and not started)


def multiples(value: int, of: int) -> str:
    """Return the nearest multiples of a number, below and above a value."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def divisors(value: int, near: int) -> str:
    """Return the nearest divisors of a value, below and above a number."""
    below = range(min(near - 1, value), 0, -1)[:SEARCH_DISTANCE]
    above = range(near + 1, value + 1)[:SEARCH_DISTANCE]
    nearest_divisors = (next((number for number in side if value % number == 0), None) for side in (below, above))
    return " or ".join(str(number) for number in nearest_divisors if number) or "1"
