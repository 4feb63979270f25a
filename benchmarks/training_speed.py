"""The training job on two single-threaded processes, compared with torch.distributed.pipelining and DeepSpeed.

python benchmarks/training_speed.py [--deepspeed PYTHON_OR_FOLDER] [--rounds 9] [--steps 4] [--json]

All train the built-in GPT with the same weights, data, microbatches, cut, fused AdamW and clipping by the norm over all
stages. The jobs run at the same time and train in turns, a few steps each, in another order every round; a job that
waits for its turn computes nothing. Tokens per second are medians; a ratio is the median over the rounds of two
neighbouring turns. CPU is the time of both processes per step, which depends less on the load of the machine. The loss
after the first turn must be the same for all, or there is no result; later, differences of rounding grow.

Our steps include everything that the job does: batches from a file, clipping, events to a file, and the agreement on
whether to stop. The others have their batches in memory and write nothing; torch has no norm over stages, so its ranks
sum theirs by hand. The job's own choice of a schedule ("auto") is measured too.

DeepSpeed runs in a separate virtual environment: pass its python, or a folder in which one is created with pip if it
does not exist yet. Without that option it is skipped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from stageline.train.gpt import GPT
from turns import Job, Turn, Turns, in_turns

LAYERS, DIM, HEADS, LENGTH, WORDS, BATCH, SIZE = 8, 192, 4, 128, 256, 16, 2
MICROBATCHES, TOKENS, WARMUP = BATCH // SIZE, BATCH * LENGTH, 2
RATE, DECAY, BETAS, MAX_NORM = 1e-3, 0.1, (0.9, 0.95), 1.0
BESIDE = {  # what each is measured against
    "stageline 1f1b": ("torch Schedule1F1B", "deepspeed"),
    "stageline zb-v": ("torch ScheduleZBVZeroBubble",),
    "stageline auto": ("torch Schedule1F1B", "torch ScheduleZBVZeroBubble", "deepspeed"),
}


# What a job does, in a process of its own.


def model() -> GPT:
    return GPT(WORDS, LENGTH, DIM, LAYERS, HEADS)


class Embed(nn.Module):
    """The embedding of the GPT."""

    def __init__(self, whole: GPT) -> None:
        super().__init__()
        self.tokens, self.positions = whole.tokens, whole.positions

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))


def pieces(folder: Path) -> list[nn.Module]:
    """Return the model as embedding, blocks and head."""
    whole = model()
    whole.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    return [Embed(whole), *whole.blocks, nn.Sequential(whole.norm, whole.head)]


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": DECAY},
        {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=1e-8, fused=True)


def batches(folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    return ((part[0], part[1]) for part in torch.from_numpy(np.load(folder / "batches.npy")))


def sum_of_losses(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / TOKENS


def run_stageline(rank: int, folder: Path, schedule: str, turns: Turns) -> None:
    from stageline.train.config.config import Config
    from stageline.train.trainer import Trainer

    class Paced(Trainer):
        def _train(self) -> None:
            turns.before_step(self._loss)
            super()._train()

    settings = [*job_settings(folder), f"job.dump_folder={folder / schedule}"]
    settings += ["parallelism.pipeline_parallel_degree=2", f"parallelism.pipeline_parallel_schedule={schedule}"]
    if schedule != "auto":  # the same cut as the others have
        settings += ["parallelism.pipeline_parallel_split=parameters"]
    Paced(Config.read(None, *settings)).run()


def job_settings(folder: Path) -> list[str]:
    return [
        "training.dataset=memmap", f"training.dataset_path={folder / 'tokens.npy'}", f"training.seq_len={LENGTH}",
        f"training.local_batch_size={BATCH}", f"parallelism.pipeline_parallel_microbatch_size={SIZE}",
        f"model.vocab_size={WORDS}", f"model.dim={DIM}", f"model.n_layers={LAYERS}", f"model.n_heads={HEADS}",
        f"training.max_norm={MAX_NORM}",
        f"optimizer.lr={RATE}", f"optimizer.weight_decay={DECAY}", f"optimizer.beta1={BETAS[0]}",
        f"optimizer.beta2={BETAS[1]}", "lr_scheduler.warmup_steps=0", "lr_scheduler.decay_type=constant",
        "training.steps=1000000", "validation.enable=false", "checkpoint.enable=false",
        "comm.train_timeout_seconds=600",
    ]  # fmt: skip


def run_torch(rank: int, folder: Path, name: str, turns: Turns) -> None:
    from torch.distributed import pipelining

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    many = name != "Schedule1F1B"
    per, layers = LAYERS // (4 if many else 2), pieces(folder)
    blocks = layers[1:-1]
    stages = [nn.Sequential(*blocks[start : start + per]) for start in range(0, LAYERS, per)]
    stages[0].insert(0, layers[0])
    stages[-1].append(layers[-1])
    mine = ([0, 3] if rank == 0 else [1, 2]) if many else [rank]
    cpu = torch.device("cpu")
    pipeline_stages = [pipelining.PipelineStage(stages[index], index, len(stages), cpu) for index in mine]
    kind: Any = getattr(pipelining.schedules, name)
    schedule = kind(
        pipeline_stages if many else pipeline_stages[0], MICROBATCHES, loss_fn=sum_of_losses, scale_grads=False
    )
    parameters = [parameter for index in mine for parameter in stages[index].parameters()]
    optimizer = make_optimizer(parameters)
    last, loss = len(stages) - 1 in mine, None
    for inputs, targets in batches(folder):
        turns.before_step(loss)
        losses: list[Tensor] = []
        arguments: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        schedule.step(*([inputs] if 0 in mine else []), **arguments)
        square = (
            nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]) ** 2
        )
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        loss = float(torch.stack(losses).sum()) if last else None


def run_deepspeed(rank: int, folder: Path, _: str, turns: Turns) -> None:
    deepspeed: Any = importlib.import_module("deepspeed")
    pipe: Any = importlib.import_module("deepspeed.pipe")
    deepspeed.init_distributed("gloo", verbose=False)
    whole = pipe.PipelineModule(
        pieces(folder),
        num_stages=2,
        partition_method="type:Block",
        # It divides by the number of microbatches.
        loss_fn=lambda logits, target: sum_of_losses(logits, target) * MICROBATCHES,
    )
    config = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": SIZE, "gradient_clipping": MAX_NORM,
        "steps_per_print": 10**9, "pipeline": {"activation_checkpoint_interval": 0},
    }  # fmt: skip
    parameters = list(whole.parameters())
    for parameter in parameters:  # else its norm is that of the first stage alone
        parameter.model_parallel = True
    engine, *_rest = deepspeed.initialize(model=whole, config=config, optimizer=make_optimizer(parameters))
    loss = None
    for inputs, targets in batches(folder):
        turns.before_step(loss)
        loss = float(
            engine.train_batch(iter(zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)))
        )


KINDS: dict[str, Callable[[int, Path, str, Turns], None]] = {
    "stageline": run_stageline, "torch": run_torch, "deepspeed": run_deepspeed,
}  # fmt: skip


def work(job: str, folder: str, steps: str, rank: str, tell: str) -> None:
    torch.set_num_threads(1)
    kind, _, what = job.partition(" ")
    KINDS[kind](int(rank), Path(folder), what, Turns(WARMUP, int(steps), int(tell)))


# What controls the jobs.


def prepare(folder: Path, steps: int) -> None:
    """Return weights, tokens and batches as the training job draws them."""
    from stageline.model.build.build import build
    from stageline.train.config.config import Config
    from stageline.train.data import Loader, open_data

    text = open_data(Config.read(None, "model.tokenizer_path=bytes")).train
    np.save(folder / "tokens.npy", text.array[:2_000_000])  # type: ignore[union-attr]
    data = open_data(Config.read(None, *job_settings(folder)))
    loader = Loader(data.train, batch=BATCH, seed=0)
    batches = [torch.stack(loader.batch(BATCH * step)).numpy() for step in range(steps)]
    np.save(folder / "batches.npy", np.stack(batches))
    torch.save(build(model, seed=0).state_dict(), folder / "weights.pt")


def deepspeed_python(path: str) -> str:
    """Return a python with DeepSpeed; in a folder, create its environment if needed."""
    if Path(path).is_file():
        return str(Path(path).absolute())
    python = Path(path).absolute() / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", path], check=True)
        wanted = [f"torch=={torch.__version__.partition('+')[0]}", "deepspeed", "numpy"]
        environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True, env=environment)
    return str(python)


def measure(pythons: dict[str, str], rounds: int, steps: int) -> dict[str, list[Turn]]:
    """Return all turns of all jobs."""
    own = os.pathsep.join(path for path in sys.path if path)
    source = str(Path(__file__).resolve().parents[1] / "src")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageline-speed-")))
        prepare(folder, WARMUP + rounds * steps + 1)
        jobs = []
        for name, python in pythons.items():
            environment = {"PYTHONPATH": own if python == sys.executable else source}
            environment |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
            command = [python, str(Path(__file__).resolve()), "--work", name, str(folder), str(steps)]
            jobs.append(Job(name, command, folder, 2, environment))
            stack.callback(jobs[-1].close)
            jobs[-1].wait()  # one after the other, so that profiles are not disturbed
            jobs[-1].turn()  # the warm-up
        return in_turns(jobs, rounds)


def summary(taken: dict[str, list[Turn]], steps: int) -> dict[str, Any]:
    """Return medians and ratios; raise an error if the losses after the first turn differ."""
    losses = {name: turns[0].loss or math.nan for name, turns in taken.items()}
    if not max(losses.values()) - min(losses.values()) < 1e-3 * max(losses.values()):
        raise RuntimeError(f"these are not the same training: the losses after the first turn are {losses}")
    rows = {
        name: {
            "tokens/s": statistics.median(steps * TOKENS / turn.seconds for turn in turns),
            "CPU ms a step": 1e3 * statistics.median(turn.cpu for turn in turns) / steps,
            "loss": losses[name],
        }
        for name, turns in taken.items()
    }
    ratios = [
        {"job": name, "against": peer,
         "times": statistics.median(b.seconds / a.seconds for a, b in zip(taken[name], taken[peer], strict=True)),
         "times, by CPU": rows[peer]["CPU ms a step"] / rows[name]["CPU ms a step"]}
        for name, peers in BESIDE.items() for peer in peers if name in taken and peer in taken
    ]  # fmt: skip
    return {"torch": str(torch.__version__), "load": os.getloadavg()[0], "jobs": rows, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", default="", help="a python that has DeepSpeed, or a folder to make one in")
    parser.add_argument("--rounds", type=int, default=9, help="turns of every job (default 9)")
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn (default 4)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    names = [*BESIDE, *dict.fromkeys(peer for peers in BESIDE.values() for peer in peers)]
    pythons = dict.fromkeys(names, sys.executable)
    missing = ""
    try:
        if not options.deepspeed:
            raise LookupError("pass --deepspeed, a python that has it or a folder to make one in")
        pythons["deepspeed"] = deepspeed_python(options.deepspeed)
    except (LookupError, subprocess.CalledProcessError) as error:
        missing = str(error)
        del pythons["deepspeed"]
    results = summary(measure(pythons, options.rounds, options.steps), options.steps)
    if options.json:
        print(json.dumps(results | {"not measured": {"deepspeed": missing} if missing else {}}, indent=2))
        return
    print(f"torch {results['torch']}, {LAYERS} blocks of width {DIM}, {BATCH} × {LENGTH} tokens in {MICROBATCHES} "
          f"microbatches, two processes; load {results['load']:.1f}")  # fmt: skip
    for name, row in results["jobs"].items():
        print(f"{name:28} {row['tokens/s']:6.0f} tokens/s  {row['CPU ms a step']:6.0f} ms of CPU a step  "
              f"loss {row['loss']:.4f}")  # fmt: skip
    for row in results["ratios"]:
        print(f"{row['job']:16} {row['times']:.2f} times {row['against']:28} {row['times, by CPU']:.2f} by CPU")
    if missing:
        print(f"{'deepspeed':28} not measured: {missing}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
