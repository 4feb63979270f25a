"""The configuration of a training job: what a TOML file, the command line and Python all say in the same words.

Every section is a dataclass, every field has a type, a default and a sentence; the defaults are the embedded job. Names
are torchtitan's wherever it has one for the thing. Everything else (reading, writing, flags, help, the page) is made
from the fields and from what their metadata says:

    help               the sentence that explains it
    minimum, maximum   the bounds of a number, themselves allowed
    above, below       the bounds of a number, themselves not allowed
    example            a value, where the default shows none
    fixed              a run that goes on from a checkpoint must have the same: it is part of the mathematics
    warn               it may differ there, and is worth a warning
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


def _say(default: Any, help: str, **more: Any) -> Any:
    """A field with its default, the sentence that explains it, and what else there is to know."""
    return field(default=default, metadata={"help": help, **more})


def _fixed(default: Any, help: str, **more: Any) -> Any:
    """A field that must stay as it is when a run goes on."""
    return _say(default, help, fixed=True, **more)


def _warn(default: Any, help: str, **more: Any) -> Any:
    """A field that may change when a run goes on, with a warning."""
    return _say(default, help, warn=True, **more)


@dataclass
class Job:
    """The run as a whole."""

    dump_folder: str = _say("outputs", "The folder of the run: its config, metrics, timelines and checkpoints.")
    description: str = _say("", "What this run is, in your words; shown in its report.", example="the first run")


@dataclass
class Model:
    """What is trained."""

    name: str = _fixed(
        "gpt",
        "gpt, the built-in one; the config.json of a Hugging Face model, or its folder; or package.module:function "
        "that returns a model.",
    )
    vocab_size: int = _fixed(0, "Words that the built-in GPT knows; 0 is as many as the tokenizer has.", minimum=0)
    dim: int = _fixed(128, "Width of the built-in GPT.", minimum=1)
    n_layers: int = _fixed(8, "Blocks of the built-in GPT.", minimum=1)
    n_heads: int = _fixed(4, "Heads of attention of the built-in GPT.", minimum=1)
    dropout: float = _fixed(0.0, "Share of activations that the built-in GPT drops in training.", minimum=0, below=1)
    tie_embeddings: bool = _fixed(False, "Use one matrix as embedding and head in the built-in GPT.")
    tokenizer_path: str = _fixed("bytes", "bytes, or the tokenizer.json of a Hugging Face tokenizer.")


@dataclass
class Training:
    """How long, on what, in which precision."""

    dataset: str = _fixed(
        "python",
        "python, the source of Python's standard library; text, files or folders of it; memmap, a file of tokens; "
        "dataset, a Hugging Face data set on disk; or package.module:function that returns an iterable.",
    )
    dataset_path: str = _fixed(
        "", "Where the data is: a file, a folder, or several with commas between.", example="data/train.txt"
    )
    dataset_column: str = _fixed("text", "The column of a Hugging Face data set that holds the text.")
    dataset_dtype: Literal["uint8", "uint16", "int32", "uint32", "int64"] = _fixed(
        "uint16", "What the numbers in a file of tokens are; a .npy file says it itself."
    )
    seq_len: int = _fixed(128, "Tokens in a sample.", minimum=1)
    local_batch_size: int = _say(16, "Samples that a replica trains on in one step of the pipeline.", minimum=1)
    global_batch_size: int = _say(
        0,
        "Samples in one step of the optimizer, over all replicas; what they do not take at once is accumulated. "
        "0 is local_batch_size times the replicas.",
        minimum=0,
    )
    steps: int = _warn(200, "Steps of the optimizer.", minimum=1)
    time_limit: float = _say(0.0, "Minutes after which the job saves a checkpoint and ends; 0 is never.", minimum=0)
    loss: str = _fixed(
        "cross_entropy",
        "cross_entropy, weighted_cross_entropy, mse, own (the model's), or package.module:function of two.",
    )
    loss_weights: tuple[float, ...] = _fixed(
        (), "Weights of the classes, for weighted_cross_entropy.", minimum=0, example=(1.0, 0.5)
    )
    max_norm: float = _fixed(1.0, "Clip gradients to this norm, over all stages; 0 does not.", minimum=0)
    dtype: Literal["float32", "bfloat16"] = _fixed(
        "float32", "What parameters are held in; those of bfloat16 have a float32 master that the optimizer works on."
    )
    mixed_precision_param: Literal["float32", "bfloat16", "float16"] = _fixed(
        "float32", "What autocast computes in; float16 comes with a dynamic scale of the loss."
    )
    seed: int = _fixed(
        0, "What weights, dropout and the order of the data are drawn from.", minimum=0, maximum=2**63 - 1
    )
    deterministic: bool = _warn(False, "Refuse operators that have no deterministic kernel.")


@dataclass
class Optimizer:
    """The optimizer, one of torch's."""

    name: Literal["AdamW", "Adam", "SGD", "Adafactor", "Muon"] = _fixed("AdamW", "The class in torch.optim.")
    lr: float = _fixed(2e-3, "The learning rate at its highest.", above=0)
    beta1: float = _fixed(0.9, "AdamW and Adam: decay of the mean; SGD and Muon: the momentum.", minimum=0, below=1)
    beta2: float = _fixed(0.95, "AdamW and Adam: decay of the mean square.", minimum=0, below=1)
    eps: float = _fixed(1e-8, "AdamW and Adam: what the root is kept above.", above=0)
    weight_decay: float = _fixed(0.1, "Decay of matrices; norms, biases and other vectors have none.", minimum=0)
    implementation: Literal["auto", "for-loop", "foreach", "fused"] = _warn(
        "auto", "How torch runs it; auto is fused where torch has that for the device."
    )


@dataclass
class LRScheduler:
    """The learning rate over the steps."""

    warmup_steps: int = _fixed(30, "Steps over which it rises from 0.", minimum=0)
    decay_ratio: float = _fixed(
        -1.0,
        "The share of all steps, at their end, over which it falls (WSD: 0.1 to 0.2); -1 is from the warm-up on.",
        minimum=-1,
        maximum=1,
    )
    decay_type: Literal["cosine", "linear", "sqrt", "constant"] = _fixed("cosine", "How it falls; constant does not.")
    min_lr_factor: float = _fixed(0.1, "What it falls to, as a share of the highest.", minimum=0, maximum=1)


@dataclass
class Parallelism:
    """How the model and the batch are spread."""

    pipeline_parallel_degree: int = _say(4, "Ranks of a pipeline.", minimum=1)
    data_parallel_replicate_degree: int = _say(
        0,
        "Replicas of the pipeline, each with its share of the batch; 0 is as many as there are processes for.",
        minimum=0,
    )
    pipeline_parallel_schedule: str = _say(
        "auto", "A family (see stageline families), or auto: the fastest by the model's profile."
    )
    pipeline_parallel_schedule_csv: str = _say(
        "", "A schedule from a file, in our JSON or torch's CSV.", example="schedule.csv"
    )
    pipeline_parallel_microbatch_size: int = _warn(2, "Samples in a microbatch.", minimum=1)
    pipeline_parallel_chunks: int = _say(
        0, "Stages that a rank holds, for families that let you choose; 0 is theirs.", minimum=0
    )
    pipeline_parallel_split: Literal["time", "parameters", "layers"] = _say(
        "time", "What the cut into stages balances: measured time, parameters, or the number of layers."
    )
    replan: Literal["off", "warn", "auto"] = _say(
        "off", "Where stages drift from their profile: say so (warn), or take a better order of the same stages (auto)."
    )
    replan_freq: int = _say(10, "Steps from one look at that to the next.", minimum=2)
    stragglers: bool = _say(True, "Whether to say in one line which stage became slower than the others and stays so.")
    bucket_mb: float = _say(25.0, "Megabytes of gradients that replicas reduce at once.", above=0)


@dataclass
class ActivationCheckpoint:
    """What is computed once more to save memory."""

    mode: Literal["none", "selective", "full"] = _say(
        "none", "none; full, whole stages; selective, the modules that are named."
    )
    modules: tuple[str, ...] = _say(
        (), "Names of the modules for selective, with * for any part: blocks.*.mlp.", example=("blocks.*.mlp",)
    )


@dataclass
class Compile:
    """torch.compile of the blocks."""

    enable: bool = _warn(False, "Compile the blocks of every stage.")
    backend: str = _warn("inductor", "The backend of torch.compile.")


@dataclass
class Checkpoint:
    """What is kept to go on from."""

    enable: bool = _say(True, "Write checkpoints.")
    folder: str = _say("checkpoint", "Where, inside of the run's folder.")
    interval: int = _say(100, "Steps from one to the next; the last step has one too.", minimum=1)
    keep_latest_k: int = _say(3, "How many of the newest stay; 0 is all.", minimum=0)
    async_mode: Literal["disabled", "async"] = _say("async", "async writes while training goes on.")
    load_step: int = _say(-1, "Go on from this step's checkpoint; -1 is the newest whole one.", minimum=-1)
    initial_load_path: str = _say(
        "", "Begin with the weights of a checkpoint or of safetensors files.", example="outputs/checkpoint/step-200"
    )


@dataclass
class Validation:
    """The loss on data that is not trained on."""

    enable: bool = _fixed(True, "Hold a part of the data back and evaluate on it.")
    freq: int = _say(100, "Steps from one evaluation to the next.", minimum=1)
    steps: int = _say(4, "Batches of an evaluation.", minimum=1)
    fraction: float = _fixed(
        0.05, "The share of the data that is held back, at its end, if dataset_path is empty.", above=0, below=1
    )
    dataset_path: str = _fixed("", "A file or folder of its own.", example="data/valid.txt")
    patience: int = _say(0, "End after so many evaluations without a better loss; 0 is never.", minimum=0)


@dataclass
class Metrics:
    """What is shown and kept of the steps."""

    log_freq: int = _say(10, "Steps from one line to the next where the output is no terminal.", minimum=1)
    timeline_freq: int = _say(
        50, "Steps from one measured timeline that is kept to the next; 0 keeps only the last.", minimum=0
    )
    enable_tensorboard: bool = _say(False, "Also write for TensorBoard.")
    save_tb_folder: str = _say("tb", "Where, inside of the run's folder.")
    disable_color_printing: bool = _say(False, "Print without colour.")


@dataclass
class Comm:
    """Talking to other ranks."""

    train_timeout_seconds: float = _say(
        60.0, "How long a rank may be silent before the job fails with its name.", above=0
    )


@dataclass
class Sample:
    """The text that a finished language model writes."""

    tokens: int = _say(200, "How many tokens; 0 is no sample.", minimum=0)
    prompt: str = _say("def ", "What it goes on from.")
    temperature: float = _say(0.8, "0 always takes the likeliest.", minimum=0)


@dataclass
class Config:
    """All of it.

    >>> config = Config()
    >>> config.training.steps, config.parallelism.pipeline_parallel_degree
    (200, 4)
    """

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    comm: Comm = field(default_factory=Comm)
    sample: Sample = field(default_factory=Sample)

    @classmethod
    def read(cls, path: str | Path | None = None, *sets: str) -> Config:
        """Read a TOML file and settings like "training.steps=100"; the last word wins.

        >>> Config.read(None, "training.steps=20", "model.dropout=0.1").model.dropout
        0.1
        """
        from stageline.train.config.io import read_config

        return read_config(path, sets)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        """The config that `to_dict` made plain data of; what is not said there is as by default.

        >>> Config.from_dict({"training": {"steps": 20}}).training.steps
        20
        """
        from stageline.train.config.io import from_dict

        return from_dict(data)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """All of it as plain data, for JSON.

        >>> Config().to_dict()["comm"]
        {'train_timeout_seconds': 60.0}
        """
        from stageline.train.config.io import to_dict

        return to_dict(self)

    def to_toml(self) -> str:
        """All of it as TOML, every option with its explanation.

        >>> print(Config().to_toml())  # doctest: +ELLIPSIS
        # The run as a whole.
        [job]
        ...
        """
        from stageline.train.config.io import write_toml

        return write_toml(self)
