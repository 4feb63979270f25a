"""What no option can know of another: whether the options of a config go together, and what they name is there."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePath

from stageline.common.errors import StagelineError, nearest
from stageline.schedules.io import read_schedule
from stageline.schedules.registry import find_family, schedule
from stageline.train.config.config import Config
from stageline.train.config.io import complain
from stageline.train.config.options import Unfit, options, show, unfit, value_text

LOSSES = ("cross_entropy", "weighted_cross_entropy", "mse", "own")
DATASETS = ("python", "text", "memmap", "dataset")
GPT_UNITS = 4
"""Those of the built-in GPT beside its blocks: two embeddings, the last norm, the head."""
SEARCHED = 10_000
"""How far from a number one looks for a divisor to offer."""


def validate(config: Config) -> None:
    """Refuse a config that no job can be made of; the error has a line for everything that is wrong.

    >>> validate(Config())
    >>> validate(Config.read(None, "model.dim=100", "model.n_heads=8"))
    Traceback (most recent call last):
    ...
    stageline.StagelineError: model.dim is 100 and model.n_heads is 8, which does not divide it;
        take 96 or 104 for model.dim, or 5 or 10 for model.n_heads
    """
    complain(mistakes(config))


def mistakes(config: Config) -> list[str]:
    """Everything that is wrong with a config, one sentence each.

    >>> mistakes(Config())
    []
    """
    return list(_fields(config)) or [sentence for check in CHECKS for sentence in check(config)]


def _fields(config: Config) -> Iterator[str]:
    """What Python lets one write and no file would: values of a wrong type or out of bounds."""
    for key, option in options().items():
        value = getattr(getattr(config, option.section), option.name)
        try:
            option.accept(value)
        except Unfit as error:
            yield unfit(key, show(value), error, value_text(option.sample))


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if model.name == "gpt" and model.dim % model.n_heads:
        yield (
            f"model.dim is {model.dim} and model.n_heads is {model.n_heads}, which does not divide it; take "
            f"{multiples(model.dim, model.n_heads)} for model.dim, or {divisors(model.dim, model.n_heads)} for "
            "model.n_heads"
        )
    if model.name != "gpt" and ":" not in model.name:
        yield from _hugging_face(Path(model.name))
    tokenizer = Path(model.tokenizer_path)
    if model.tokenizer_path != "bytes" and not tokenizer.is_file():
        yield (
            f"model.tokenizer_path is {show(model.tokenizer_path)}, and there is no such file; give a tokenizer.json, "
            f"or bytes{nearest(model.tokenizer_path, ['bytes'])}"
        )


def _hugging_face(path: Path) -> Iterator[str]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        yield (
            f"model.name is {show(str(path))}; it takes gpt{nearest(str(path), ['gpt'])}, a config.json that is there, "
            "a folder that has one, or package.module:function"
        )
        return
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"model.name is {show(str(path))}, and {file} is no JSON: {error}"
        return
    if not isinstance(known, dict) or "model_type" not in known:
        yield f"model.name is {show(str(path))}, and {file} has no model_type, as a Hugging Face config has"


def _data(config: Config) -> Iterator[str]:
    training, validation = config.training, config.validation
    if ":" not in training.dataset and training.dataset not in DATASETS:
        yield (
            f"training.dataset is {show(training.dataset)}; it takes one of {', '.join(DATASETS)}"
            f"{nearest(training.dataset, DATASETS)}, or package.module:function"
        )
    if training.dataset in ("text", "memmap", "dataset") and not training.dataset_path:
        yield (
            f"training.dataset is {training.dataset}, and training.dataset_path is empty; say where the data is, like "
            "training.dataset_path=data/train.txt"
        )
    if training.dataset == "python" and training.dataset_path:
        yield (
            f"training.dataset is python, which comes with Python, and training.dataset_path is "
            f"{show(training.dataset_path)}; for files of your own, training.dataset is text, memmap or dataset"
        )
    named = [("training.dataset_path", training.dataset_path), ("validation.dataset_path", validation.dataset_path)]
    for key, paths in named if ":" not in training.dataset else []:
        for path in filter(None, map(str.strip, paths.split(","))):
            if not Path(path).exists():
                yield f"{key} names {show(path)}, and there is no such file or folder"
    if validation.dataset_path and not validation.enable:
        yield (
            f"validation.dataset_path is {show(validation.dataset_path)}, and validation.enable is false; enable it, "
            "or leave the path out"
        )


def _folders(config: Config) -> Iterator[str]:
    inside = {
        "checkpoint.folder": config.checkpoint.folder,
        "metrics.save_tb_folder": config.metrics.save_tb_folder,
    }
    for key, name in inside.items():
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            yield f"{key} is {show(name)}; it is a folder inside of job.dump_folder: give its name alone"
    if not config.job.dump_folder:
        yield "job.dump_folder is empty; name a folder, like outputs"


def _patience(config: Config) -> Iterator[str]:
    asked = config.validation
    if asked.patience and not asked.enable:
        yield (
            f"validation.patience is {asked.patience}, and validation.enable is false, so there is no loss to wait "
            "for; enable it, or leave the patience out"
        )


def _loss(config: Config) -> Iterator[str]:
    training = config.training
    if ":" not in training.loss and training.loss not in LOSSES:
        yield (
            f"training.loss is {show(training.loss)}; it takes one of {', '.join(LOSSES)}"
            f"{nearest(training.loss, LOSSES)}, or package.module:function"
        )
    weighted = training.loss == "weighted_cross_entropy"
    if weighted and not training.loss_weights:
        yield (
            "training.loss is weighted_cross_entropy, and training.loss_weights is empty; give one weight for each "
            "class, like training.loss_weights=1.0,0.5, or take cross_entropy"
        )
    if not weighted and training.loss_weights:
        yield (
            f"training.loss_weights has {len(training.loss_weights)} weights, and training.loss is {training.loss}, "
            "which has no use for them; take weighted_cross_entropy, or leave them out"
        )


def _batch(config: Config) -> Iterator[str]:
    local, size = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    if local % size:
        over = "is more than" if size > local else f"leaves {local % size} of"
        yield (
            f"parallelism.pipeline_parallel_microbatch_size is {size}, which {over} the {local} samples of "
            f"training.local_batch_size; take {divisors(local, size)} for the microbatch, or {multiples(local, size)} "
            "for the local batch"
        )
    replicas, whole = config.parallelism.data_parallel_replicate_degree, config.training.global_batch_size
    at_once = local * max(1, replicas)
    if whole % at_once:
        by = f" × {replicas} replicas (parallelism.data_parallel_replicate_degree)" if replicas > 1 else ""
        yield (
            f"training.global_batch_size is {whole}, which is no multiple of training.local_batch_size {local}{by}; "
            f"take {multiples(whole, at_once)}, or 0 for one local batch a replica"
        )


def _learning_rate(config: Config) -> Iterator[str]:
    steps, ratio, warmup = config.training.steps, config.lr_scheduler.decay_ratio, config.lr_scheduler.warmup_steps
    if -1 < ratio < 0:
        yield f"lr_scheduler.decay_ratio is {ratio}; it takes -1, or a share of the steps from 0 to 1"
    falling = round(ratio * steps)
    if ratio > 0 and warmup + falling > steps:
        longer = f", or at least {math.ceil(warmup / (1 - ratio)) + 1} for the steps" if ratio < 1 else ""
        yield (
            f"lr_scheduler.warmup_steps is {warmup} and lr_scheduler.decay_ratio is {ratio}, {falling} steps, together "
            f"more than the {steps} of training.steps; take up to {steps - falling} for the warm-up{longer}"
        )


def _recomputation(config: Config) -> Iterator[str]:
    asked = config.activation_checkpoint
    if asked.mode == "selective" and not asked.modules:
        yield (
            "activation_checkpoint.mode is selective, and activation_checkpoint.modules is empty; name modules, like "
            "activation_checkpoint.modules=blocks.*.mlp, or take full"
        )
    if asked.mode != "selective" and asked.modules:
        yield (
            f"activation_checkpoint.modules is {show(asked.modules)}, and activation_checkpoint.mode is {asked.mode}; "
            "take selective, or leave the modules out"
        )


def _schedule(config: Config) -> Iterator[str]:
    asked, local, key = config.parallelism, config.training.local_batch_size, "parallelism.pipeline_parallel_schedule"
    name, size, ranks = (
        asked.pipeline_parallel_schedule,
        asked.pipeline_parallel_microbatch_size,
        asked.pipeline_parallel_degree,
    )
    if asked.pipeline_parallel_schedule_csv:
        yield from _schedule_file(asked.pipeline_parallel_schedule_csv, name, ranks, local, size)
        return
    if name.lower() == "auto":
        return
    try:
        family = find_family(name)
    except StagelineError as error:
        yield f"{key} is {show(name)}: {error}; or take auto"
        return
    chunks = {"chunks": asked.pipeline_parallel_chunks} if asked.pipeline_parallel_chunks else {}
    if chunks and "chunks" not in family.options:
        yield (
            f"parallelism.pipeline_parallel_chunks is {chunks['chunks']}, and {key} is {name}, which leaves no choice; "
            f"take 0, or a family that has chunks, like interleaved"
        )
    elif local % size == 0:
        try:
            if not schedule(name, ranks, local // size, **chunks).training:
                yield f"{key} is {name}, which is for inference; take one that trains, or auto"
        except StagelineError as error:
            yield (
                f"{key} is {name}, for the {ranks} ranks of parallelism.pipeline_parallel_degree and {local // size} "
                f"microbatches, training.local_batch_size {local} / parallelism.pipeline_parallel_microbatch_size "
                f"{size}: {error}"
            )


def _schedule_file(file: str, name: str, ranks: int, local: int, size: int) -> Iterator[str]:
    key = "parallelism.pipeline_parallel_schedule_csv"
    if name.lower() != "auto":
        yield f"{key} is {show(file)}, and parallelism.pipeline_parallel_schedule is {name}; leave one of them out"
    try:
        found = read_schedule(file)
    except StagelineError as error:
        yield f"{key} is {show(file)}: {error}"
        return
    if found.ranks != ranks:
        yield (
            f"{key} is {show(file)}, a schedule for {found.ranks} ranks, and parallelism.pipeline_parallel_degree is "
            f"{ranks}; take {found.ranks}"
        )
    if local % size == 0 and found.microbatches != local // size:
        yield (
            f"{key} is {show(file)}, a schedule for {found.microbatches} microbatches, and training.local_batch_size "
            f"{local} / parallelism.pipeline_parallel_microbatch_size {size} makes {local // size}; take "
            f"{found.microbatches * size} for the local batch"
        )


def _units(config: Config) -> Iterator[str]:
    """The built-in GPT is known without building it."""
    if config.model.name == "gpt":
        units = config.model.n_layers + GPT_UNITS
        yield from too_few_units(config, units, f"model.n_layers {config.model.n_layers} makes {units}")


def too_few_units(config: Config, units: int, said: str) -> Iterator[str]:
    """Whether a model of so many units can be cut into the stages that are asked for; `said` is how many it has.

    >>> print(*too_few_units(Config.read(None, "parallelism.pipeline_parallel_degree=40"), 8, "the model has 8"))
    parallelism.pipeline_parallel_degree is 40, which makes 40 stages, and every stage needs a unit of the model:
    the model has 8; take up to 8 ranks, or a model with at least 40
    """
    asked, local = config.parallelism, config.training.local_batch_size
    ranks, chunks = asked.pipeline_parallel_degree, asked.pipeline_parallel_chunks
    stages = ranks * max(1, chunks)
    how = f" and parallelism.pipeline_parallel_chunks is {chunks}" if chunks else ""
    with suppress(StagelineError):  # what is wrong with the schedule itself is said elsewhere
        if asked.pipeline_parallel_schedule_csv:
            stages = read_schedule(asked.pipeline_parallel_schedule_csv).stages
            how = f" and parallelism.pipeline_parallel_schedule_csv is {show(asked.pipeline_parallel_schedule_csv)}"
        elif asked.pipeline_parallel_schedule.lower() != "auto":
            microbatches = max(1, local // asked.pipeline_parallel_microbatch_size)
            given = {"chunks": chunks} if chunks else {}
            stages = schedule(asked.pipeline_parallel_schedule, ranks, microbatches, **given).stages
            how += f" and parallelism.pipeline_parallel_schedule is {asked.pipeline_parallel_schedule}"
    if stages > units:
        most = units // max(1, stages // ranks)
        fewer = f"take up to {most} ranks" if most else "take fewer chunks, or another schedule"
        yield (
            f"parallelism.pipeline_parallel_degree is {ranks}{how}, which makes {stages} stages, and every stage needs "
            f"a unit of the model: {said}; {fewer}, or a model with at least {stages}"
        )


Check = Callable[[Config], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    _folders,
    _model,
    _data,
    _patience,
    _loss,
    _batch,
    _learning_rate,
    _recomputation,
    _schedule,
    _units,
)


def known_without_torch(config: Config) -> bool:
    """Whether `validate` says all that can be said of a config before it runs: nothing has to be opened or built.

    >>> known_without_torch(Config()), known_without_torch(Config.read(None, "model.name=package:function"))
    (True, False)
    """
    built_in = config.model.name == "gpt" and config.model.tokenizer_path == "bytes" and not config.model.vocab_size
    plain = config.training.dataset == "python" and config.training.loss == "cross_entropy"
    new = not Path(config.job.dump_folder).exists() and not config.checkpoint.initial_load_path
    chooses = config.activation_checkpoint.mode == "selective" or config.checkpoint.load_step >= 0
    patient = config.validation.patience or config.validation.dataset_path
    return bool(built_in and plain and new and not chooses and not patient and "WORLD_SIZE" not in os.environ)


def multiples(value: int, of: int) -> str:
    """The multiples of a number that are nearest to a value, below and above.

    >>> multiples(100, 8), multiples(3, 8)
    ('96 or 104', '8')
    """
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def divisors(value: int, near: int) -> str:
    """The divisors of a value that are nearest to a number, below and above.

    >>> divisors(100, 8), divisors(16, 20)
    ('5 or 10', '16')
    """
    below = range(min(near - 1, value), 0, -1)[:SEARCHED]
    above = range(near + 1, value + 1)[:SEARCHED]
    found = [next((each for each in side if value % each == 0), None) for side in (below, above)]
    return " or ".join(str(each) for each in found if each) or "1"
