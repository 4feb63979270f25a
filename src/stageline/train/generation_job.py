"""`stageline generate`: continue a prompt with the newest checkpoint of a run, on the ranks of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageline.common.errors import StagelineError
from stageline.common.interrupts import at_end, end_line, install
from stageline.common.temporary_folder import TemporaryFolder
from stageline.distributed.bootstrap import job_host
from stageline.distributed.rank_host import RankHost
from stageline.model.huggingface import own_loss
from stageline.runtime.pipeline import Pipeline
from stageline.schedules.registry import schedule
from stageline.train.checkpoint import Checkpoint, open_checkpoint
from stageline.train.checkpoint.manifest import MANIFEST
from stageline.train.checkpoint.remote import Location, location
from stageline.train.checkpoint_state import find_checkpoint
from stageline.train.config.config import Config, Parallelism
from stageline.train.config.rules import GPT_UNITS, TOKENIZERS
from stageline.train.data import BytePairs, Tokenizer, find_tokenizer, tokenizer_name
from stageline.train.generation import Sampling, generate, text_pieces
from stageline.train.launch import run_on
from stageline.train.layout import JobLayout, find_job_layout, process_settings
from stageline.train.pipeline_state import check_model, load_weights_of
from stageline.train.setup import split_model
from stageline.train.task import Task, make_task

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MODULES = ("stageline.train.generation_job",)


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate, from which run."""

    checkpoints: str
    """A folder of checkpoints, or one of them."""
    prompt: str | None
    """None is the prompt of the run."""
    tokens: int
    sampling: Mapping[str, Any]
    """Fields of `Sampling`; the others are those of the run's own sample."""
    parallelism: Parallelism
    step: int = -1
    """The step of the checkpoint; -1 is the newest undamaged one."""
    tokenizer: str = ""
    """A tokenizer that replaces the one of the run."""


def generate_on(processes: int, request: GenerationRequest) -> None:
    """Generate on processes of this machine; raise or exit as one process would."""
    run_on(processes, _generate_as_rank, (asdict(request),), modules=MODULES)


def _generate_as_rank(fields: dict[str, Any]) -> None:
    install(launched=int(os.environ["RANK"]))
    os.setsid()  # Ctrl-C reaches the command alone, which passes it on
    request = GenerationRequest(**fields)
    generate_text(replace(request, parallelism=Parallelism(**fields["parallelism"])))


def generate_text(request: GenerationRequest) -> None:
    """Print the prompt, and its continuation as it is generated; every process calls this."""
    if request.tokens < 1:
        raise StagelineError(f"tokens is {request.tokens}; it must be at least 1")
    layout = find_job_layout(Config(parallelism=request.parallelism))
    config = Config(parallelism=request.parallelism)
    with process_settings(config, layout):
        host = job_host(config.comm.train_timeout_seconds)
        with _open(location(request.checkpoints), request.step, host) as checkpoint:
            if not isinstance(checkpoint.state, dict) or "config" not in checkpoint.state:
                raise StagelineError(f"{checkpoint.path} was not saved by stageline train; it has no config")
            config = replace(Config.from_dict(checkpoint.state["config"]), parallelism=request.parallelism)
            _check_ranks(config, layout.ranks)
            tokenizer = _tokenizer(request.tokenizer, config, checkpoint)
            task = make_task(config, _vocabulary(checkpoint, tokenizer))
            pipe = _pipeline(config, layout, task, checkpoint)
        text = config.sample.prompt if request.prompt is None else request.prompt
        prompt = [int(token) for token in tokenizer.encode(text or "\n")]
        of_run = {"temperature": config.sample.temperature, "top_p": config.sample.top_p}
        tokens = generate(
            pipe,
            prompt,
            request.tokens,
            length=config.training.seq_len,
            share=lambda token: _share(token, layout, host),
            sampling=Sampling(**{**of_run, **request.sampling}),
            inputs=lambda rows: _inputs(task, rows),
        )
        print_stream(tokenizer, prompt, tokens, show=layout.main)


def print_stream(tokenizer: Tokenizer, prompt: list[int], tokens: Any, *, show: bool) -> None:
    """Print the prompt and the text of the tokens as they come; a process that does not show it takes part."""
    if not show:
        for _ in tokens:
            pass
        return
    print(tokenizer.decode(prompt), end="", flush=True)
    forget = at_end(end_line)
    try:
        for piece in text_pieces(tokenizer, prompt, tokens):
            print(piece, end="", flush=True)
    finally:  # an error starts a new line, too
        forget()
        print(flush=True)


def _open(where: Location, step: int, host: RankHost) -> Checkpoint:
    if (where / MANIFEST).exists():
        return open_checkpoint(where)
    checkpoint = find_checkpoint(where, step, host, weights_only=True)
    if checkpoint is None:
        raise StagelineError(f"{where} has no checkpoint yet; train at least until the first one is saved")
    return checkpoint


def _tokenizer(replacement: str, config: Config, checkpoint: Checkpoint) -> Tokenizer:
    """Return the replacement, or the tokenizer that the config of a run names; or else the copy in the checkpoint.

    The copy is needed if the tokenizer is gone, or if the merges of the built-in one have changed since.
    """
    name = replacement or tokenizer_name(config)
    saved = [file for file in TOKENIZER_FILES if file in checkpoint.manifest.files]
    if name in TOKENIZERS:
        if name == "bytes" and not saved and config.training.dataset not in ("python", "text"):
            raise StagelineError(
                f"{checkpoint.path} has no tokenizer: the run was trained on tokens from an unknown tokenizer; pass "
                "that tokenizer as --tokenizer"
            )
        tokenizer = find_tokenizer(name)
        is_changed = isinstance(tokenizer, BytePairs) and any(
            checkpoint.read_asset(file) != tokenizer.files()[file] for file in saved
        )
        if replacement or not is_changed:
            return tokenizer
    elif replacement or Path(name).exists() or not saved:
        return find_tokenizer(name)
    with TemporaryFolder("tokenizer-") as folder:
        for file in saved:
            (folder / file).write_bytes(checkpoint.read_asset(file))
        return find_tokenizer(str(folder))


def _vocabulary(checkpoint: Checkpoint, tokenizer: Tokenizer) -> int:
    """Return the size of the vocabulary that the built-in GPT was trained with, or that of the tokenizer."""
    embedding = checkpoint.manifest.model.get("tokens.weight")
    if embedding is None:
        return tokenizer.size
    if tokenizer.size > embedding.shape[0]:
        raise StagelineError(
            f"the tokenizer {tokenizer.name} has {tokenizer.size:,} tokens, but the model in {checkpoint.path} has "
            f"{embedding.shape[0]:,}; pass the tokenizer that it was trained with as --tokenizer"
        )
    return embedding.shape[0]


def _check_ranks(config: Config, ranks: int) -> None:
    units = config.model.n_layers + GPT_UNITS
    if config.model.name == "gpt" and ranks > units:
        raise StagelineError(
            f"ranks is {ranks}, but the model has only {units} units to split; use at most {units} ranks"
        )


def _pipeline(config: Config, layout: JobLayout, task: Task, checkpoint: Checkpoint) -> Pipeline:
    """Build the pipeline with the weights of a checkpoint; a process has memory for its own stages only."""
    example = _inputs(task, torch.zeros(1, 2, dtype=torch.long))
    staged, _ = split_model(task, layout.ranks, None, example, config.training.seed, layout.device)
    pipe = Pipeline(
        staged,
        loss_fn=task.loss.function,
        schedule=schedule("gpipe", layout.ranks, 1),
        seed=config.training.seed,
        deadline=config.comm.train_timeout_seconds,
        compare_weights=False,
        device=layout.device,
    )
    check_model(pipe, checkpoint)
    load_weights_of(pipe, checkpoint)
    return pipe


def _inputs(task: Task, rows: Tensor) -> Any:
    return {"input_ids": rows} if task.loss.function is own_loss else rows


def _share(token: int, layout: JobLayout, host: RankHost) -> int:
    """Give all processes the token of the last rank."""
    if layout.processes == 1:
        return token
    return int(host.all_reduce(np.array([token if layout.rank == layout.processes - 1 else 0], float))[0])
