"""The configuration of a training job: one dataclass per section, the same for TOML files, flags and Python.

Every field has a type that states what it accepts, a default and a help sentence; the defaults are the built-in job.
Names are torchtitan's where it has one. Reading, writing, flags, help and docs/config.md are generated from the fields
and their metadata:

    help       one sentence that explains the option
    example    a value to show, where the default is empty
    resume     "same": a resumed run must have the same value, because it is part of the mathematics;
               "warning": it may differ, with a warning; "free" (default): it may differ
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from stageline.common.checked_json import NonNegative, Range

Positive = Annotated[float, Range(above=0)]
PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
Degree = Annotated[int, Range(-1)]
"""A number of processes in one dimension of the mesh; -1 is the rest: the processes that the others leave."""


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


def _same(default: Any, help: str, **metadata: Any) -> Any:
    return _option(default, help, resume="same", **metadata)


def _warning(default: Any, help: str, **metadata: Any) -> Any:
    return _option(default, help, resume="warning", **metadata)


@dataclass
class Job:
    """The run as a whole."""

    dump_folder: str = _option("outputs", "Folder of the run: config, metrics, timelines and checkpoints.")
    description: str = _option("", "Description of the run, shown in its report.", example="the first run")


@dataclass
class Model:
    """What is trained."""

    name: str = _same(
        "gpt",
        "gpt, the built-in model; a Hugging Face config.json, a folder that contains one, or a model on the hub "
        "(owner/name); or package.module:function that returns a model. Weights are initialized randomly unless "
        "checkpoint.initial_load_path is set.",
    )
    vocab_size: NonNegativeInt = _same(0, "Vocabulary size of the built-in GPT; 0 uses the tokenizer's.")
    dim: PositiveInt = _same(64, "Width of the built-in GPT.")
    n_layers: PositiveInt = _same(
        7,
        "Blocks of the built-in GPT. The head takes as long as a block, so 7 blocks divide evenly among 2 stages.",
    )
    n_heads: PositiveInt = _same(4, "Attention heads of the built-in GPT.")
    dropout: Annotated[float, Range(0, below=1)] = _same(0.0, "Dropout probability of the built-in GPT.")
    tie_embeddings: bool = _same(False, "Tie the embedding and the head of the built-in GPT.")
    tokenizer_path: str = _same(
        "auto",
        "bytes; python, 1,024 byte pairs of Python code; a Hugging Face tokenizer.json; or auto: python for the "
        "built-in GPT on the python dataset, else bytes.",
    )


@dataclass
class Training:
    """Steps, data, loss and precision."""

    dataset: str = _same(
        "python",
        "python, the code of Python's standard library; text, text files or folders; memmap, a file of tokens; "
        "dataset, a Hugging Face dataset on disk, or .jsonl or .parquet files; or package.module:function that "
        "returns an iterable.",
    )
    dataset_path: str = _same(
        "", "Path of the data: a file, a folder, or several separated by commas.", example="data/train.txt"
    )
    dataset_column: str = _same("text", "Text column of a dataset.")
    dataset_dtype: Literal["uint8", "uint16", "int32", "uint32", "int64"] = _same(
        "uint16", "Data type of a file of tokens; a .npy file states its own."
    )
    seq_len: PositiveInt = _same(128, "Tokens per sample.")
    local_batch_size: PositiveInt = _option(16, "Samples per replica in one pipeline step.")
    global_batch_size: NonNegativeInt = _option(
        0,
        "Samples per optimizer step over all replicas; gradients are accumulated if this exceeds one batch per "
        "replica. 0 means local_batch_size times the number of replicas.",
    )
    steps: PositiveInt = _warning(800, "Number of optimizer steps.")
    time_limit: NonNegative = _option(0.0, "Stop with a checkpoint after this many minutes; 0 means no limit.")
    loss: str = _same(
        "cross_entropy",
        "cross_entropy, weighted_cross_entropy, mse, own (the model's own loss), "
        "or package.module:function(output, targets).",
    )
    loss_weights: tuple[NonNegative, ...] = _same((), "Class weights for weighted_cross_entropy.", example=(1.0, 0.5))
    max_norm: NonNegative = _same(1.0, "Clip gradients to this norm over all stages; 0 disables clipping.")
    dtype: Literal["float32", "bfloat16"] = _same(
        "float32", "Data type of the parameters; with bfloat16, the optimizer updates a float32 master copy."
    )
    mixed_precision_param: Literal["float32", "bfloat16", "float16"] = _same(
        "float32", "Data type of autocast; float16 adds dynamic loss scaling."
    )
    seed: Annotated[int, Range(0, 2**63 - 1)] = _same(0, "Random seed of weights, dropout and data order.")
    continuous_steps: bool = _option(
        False,
        "Let a rank start the next step before the others have finished the current one, with identical results. "
        "Requires float32 parameters and memory for a copy of parameters and optimizer state; not compatible with "
        "float16, Muon or gradient accumulation.",
    )
    deterministic: bool = _warning(False, "Raise an error for operators without a deterministic kernel.")


@dataclass
class Optimizer:
    """One of torch's optimizers."""

    name: Literal["AdamW", "Adam", "SGD", "Adafactor", "Muon"] = _same("AdamW", "Class in torch.optim.")
    lr: Positive = _same(1e-2, "Peak learning rate.")
    beta1: Annotated[float, Range(0, below=1)] = _same(0.9, "First beta of AdamW and Adam; momentum of SGD and Muon.")
    beta2: Annotated[float, Range(0, below=1)] = _same(0.95, "Second beta of AdamW and Adam.")
    eps: Positive = _same(1e-8, "Epsilon of AdamW and Adam.")
    weight_decay: NonNegative = _same(
        0.1, "Weight decay of matrices; not applied to vectors, such as norms and biases."
    )
    implementation: Literal["auto", "for-loop", "foreach", "fused"] = _warning(
        "auto", "Implementation in torch; auto is fused where the device supports it."
    )


@dataclass
class LRScheduler:
    """The learning rate over the steps."""

    warmup_steps: NonNegativeInt = _same(30, "Steps over which the learning rate rises from 0.")
    decay_ratio: Annotated[float, Range(-1, 1)] = _same(
        -1.0,
        "Final fraction of the steps over which the learning rate decays (0.1 to 0.2 for warmup-stable-decay); -1 "
        "decays from the end of the warm-up.",
    )
    decay_type: Literal["cosine", "linear", "sqrt", "constant"] = _same(
        "cosine", "Shape of the decay; constant disables it."
    )
    min_lr_factor: Annotated[float, Range(0, 1)] = _same(0.1, "Final learning rate, as a fraction of the peak.")


@dataclass
class Parallelism:
    """How the model and the batch are distributed."""

    launcher: Literal["processes", "threads"] = _option(
        "processes",
        "How stageline train starts its ranks on this machine: as processes, or as threads of one process. Ignored "
        "under torchrun, SLURM or Ray, which start the ranks themselves.",
    )
    pipeline_parallel_degree: Degree = _option(
        -1,
        "Ranks per pipeline; -1 takes all processes that the other degrees leave; stageline train starts one per GPU "
        "or, without GPUs, one per core, up to 4. 0 takes the number of ranks in the schedule file or, without one, "
        "up to 4. If another degree is -1, the default is 0.",
    )
    data_parallel_replicate_degree: Degree = _option(
        1,
        "Replicas of the pipeline, each with its share of the batch; -1 takes all remaining processes. If unset, it "
        "is 1 if another degree is -1, and -1 otherwise. 0 means -1 and is deprecated.",
    )
    data_parallel_shard_degree: Degree = _option(
        1,
        "Processes that share the parameters, gradients and optimizer state of a stage (FSDP2), each with its own "
        "samples; -1 takes all remaining processes.",
    )
    tensor_parallel_degree: Degree = _option(
        1, "Processes that split the work of each module; -1 takes all remaining processes."
    )
    shard_optimizer: bool = _option(
        False, "Divide the optimizer state among the replicas (ZeRO-1), with identical results and less memory."
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = _option(
        "default",
        "When a sharded stage frees the parameters that it gathers: after its last use in a step (default, never), or "
        "after every action, block by block (always).",
    )
    pipeline_parallel_schedule: str = _option(
        "auto", "Schedule family (see stageline families), or auto: the fastest according to the model's profile."
    )
    pipeline_parallel_schedule_csv: str = _option(
        "", "File with a schedule: Stageline's JSON, or torch's CSV.", example="schedule.csv"
    )
    pipeline_parallel_microbatch_size: PositiveInt = _warning(2, "Samples per microbatch.")
    pipeline_parallel_chunks: NonNegativeInt = _option(
        0, "Stages per rank, for families with this option; 0 uses the family's default."
    )
    pipeline_parallel_split: Literal["time", "parameters", "layers"] = _option(
        "time", "What to balance between stages: measured time, parameters, or the number of layers."
    )
    replan: Literal["off", "warn", "auto"] = _option(
        "off",
        "If stage times drift from the profile: report it (warn), or switch to a better order of actions (auto).",
    )
    replan_freq: Annotated[int, Range(2)] = _option(10, "Steps between two checks for drift.")
    stragglers: bool = _option(True, "Report a stage that becomes slower than the others and stays slower.")
    bucket_mb: Positive = _option(25.0, "MiB of gradients per all-reduce of the replicas.")


@dataclass
class ActivationCheckpoint:
    """What is recomputed to save memory."""

    mode: Literal["none", "selective", "full"] = _option(
        "none", "none; full, all stages; selective, the modules listed below."
    )
    modules: tuple[str, ...] = _option(
        (), "Modules to recompute with selective; * matches any part of a name.", example=("blocks.*.mlp",)
    )


@dataclass
class Compile:
    """torch.compile of the blocks."""

    enable: bool = _warning(False, "Compile the blocks of every stage.")
    backend: str = _warning("inductor", "The backend of torch.compile; graphs runs captured graphs without a compiler.")
    cuda_graphs: bool = _warning(False, "Capture the actions of stages on GPUs as CUDA graphs, compiled or not.")


@dataclass
class Checkpoint:
    """Checkpoints to resume from."""

    enable: bool = _option(True, "Write checkpoints.")
    folder: str = _option(
        "checkpoint",
        "Folder of the checkpoints, inside the run's folder; or a URL of an object store, such as s3://bucket/run.",
    )
    interval: PositiveInt = _option(100, "Steps between checkpoints; one is always saved after the last step.")
    keep_latest_k: NonNegativeInt = _option(3, "Number of newest checkpoints to keep; 0 keeps all.")
    async_mode: Literal["disabled", "async"] = _option(
        "async", "async writes checkpoints while training continues; disabled waits until each one is written."
    )
    load_step: Annotated[int, Range(-1)] = _option(
        -1, "Resume from the checkpoint of this step; -1 is the newest intact one."
    )
    initial_load_path: str = _option(
        "",
        "Initialize the weights from a checkpoint, from safetensors files, or from a model of the Hugging Face hub "
        "(owner/name).",
        example="outputs/checkpoint/step-00000200",
    )


@dataclass
class Validation:
    """Loss on validation data."""

    enable: bool = _same(True, "Evaluate on validation data.")
    freq: PositiveInt = _option(100, "Steps between validations.")
    steps: PositiveInt = _option(4, "Batches per validation.")
    fraction: Annotated[float, Range(above=0, below=1)] = _same(
        0.05, "Fraction of the training data, at its end, reserved for validation if dataset_path is empty."
    )
    dataset_path: str = _same("", "File or folder of validation data.", example="data/valid.txt")
    patience: NonNegativeInt = _option(0, "Stop after this many validations without a better loss; 0 disables it.")


@dataclass
class Metrics:
    """Console output and metrics of the steps."""

    log_freq: PositiveInt = _option(10, "Steps between lines when the output is not a terminal.")
    timeline_freq: NonNegativeInt = _option(50, "Steps between saved timelines; 0 saves only the last.")
    enable_tensorboard: bool = _option(False, "Also write metrics for TensorBoard.")
    save_tb_folder: str = _option("tb", "Folder of the TensorBoard files, inside the run's folder.")
    enable_wandb: bool = _option(False, "Also send metrics to Weights & Biases.")
    wandb_project: str = _option("stageline", "Project of the run in Weights & Biases.")
    peak_tflops: NonNegative = _option(
        0.0,
        "Peak TFLOP/s of a device, for the model FLOPs utilization (MFU); 0 uses the 16-bit peak of a known GPU, and "
        "shows no MFU for other devices or float32.",
    )
    disable_color_printing: bool = _option(False, "Print without colour.")


@dataclass
class Comm:
    """Communication between ranks."""

    train_timeout_seconds: Positive = _option(
        60.0, "Seconds of silence from a rank after which the job fails and names it."
    )


@dataclass
class Recovery:
    """What happens when a rank is lost; for jobs that stageline itself starts as processes."""

    max_restarts: NonNegativeInt = _option(
        3, "Maximum number of lost ranks that the job recovers from; 0 ends the job at the first loss."
    )
    on_loss: tuple[str, ...] = _option(
        ("restart", "spare"),
        "Actions to try, in order, when a rank is lost: restart restarts it; spare replaces it with a spare process; "
        "shrink_replicas trains with the other replicas until it is back; replan makes a new plan for the remaining "
        "ranks.",
    )
    spares: NonNegativeInt = _option(0, "Number of spare processes that can replace a lost rank.")
    memory_interval: NonNegativeInt = _option(
        0,
        "Steps between copies of the state in host memory, from which all ranks resume after a loss; 0 copies after "
        "every step, or less often to keep the cost below 2%.",
    )


@dataclass
class Sample:
    """Sample text from the trained language model."""

    tokens: NonNegativeInt = _option(
        200, "Number of tokens; 0 disables the sample. It ends with the last complete line, if there is one."
    )
    prompt: str = _option("def", "Prompt to continue.")
    temperature: NonNegative = _option(0.4, "Sampling temperature; 0 always picks the most likely token.")
    top_p: Annotated[float, Range(maximum=1, above=0)] = _option(
        0.9, "Sample only from the most likely tokens whose probabilities add up to this; 1 means all tokens."
    )


@dataclass
class Config:
    """All sections.

    >>> config = Config()
    >>> config.training.steps, config.parallelism.pipeline_parallel_schedule
    (800, 'auto')
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
    recovery: Recovery = field(default_factory=Recovery)
    sample: Sample = field(default_factory=Sample)

    @classmethod
    def read(cls, path: str | Path | None = None, *settings: str) -> Config:
        """Read a TOML file, then apply settings such as "training.steps=100"; later settings win.

        >>> Config.read(None, "training.steps=20", "model.dropout=0.1").model.dropout
        0.1
        """
        from stageline.train.config.io import read_config

        return read_config(path, settings)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        """Return the config of a dict from `to_dict`; missing options have their defaults.

        >>> Config.from_dict({"training": {"steps": 20}}).training.steps
        20
        """
        from stageline.train.config.io import from_dict

        return from_dict(data)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return all options as plain data, for JSON.

        >>> Config().to_dict()["comm"]
        {'train_timeout_seconds': 60.0}
        """
        from stageline.train.config.io import to_dict

        return to_dict(self)

    def to_toml(self) -> str:
        """Return all options as TOML, each with its explanation.

        >>> print(Config().to_toml())  # doctest: +ELLIPSIS
        # The run as a whole.
        [job]
        ...
        """
        from stageline.train.config.io import write_toml

        return write_toml(self)
