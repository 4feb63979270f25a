"""The training job on two processes of one thread each, against torch.distributed.pipelining and DeepSpeed.

python benchmarks/training_speed.py [--deepspeed PYTHON_OR_FOLDER] [--rounds 9] [--steps 4] [--json]

All train the built-in GPT with the same weights, data, microbatches, cut, fused AdamW and clipping by the norm over all
stages. The jobs are there together and train in turns, a few steps each, in another order every round; one that waits
for its turn computes nothing. Tokens a second are medians; a ratio is the median over the rounds of two turns that were
close in time. CPU is what both processes used for a step, which the load of the machine changes less. The loss at the
end has to be the same for all, or there is no result.

What is measured of this job is all that it does in a step: batches from a file, clipping, events into a file, agreeing
on whether to stop. The others have their batches in memory and write nothing; torch has no norm over stages, so its
ranks add up theirs by hand. The job's own choice of a schedule ("auto") is measured too.

DeepSpeed is run from a virtual environment of its own: give its python, or a folder, in which one is made with pip if
it is not there yet. Without that option it is left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
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

LAYERS, DIM, HEADS, LENGTH, WORDS, BATCH, SIZE = 8, 192, 4, 128, 256, 16, 2
MICROBATCHES, TOKENS, WARMUP = BATCH // SIZE, BATCH * LENGTH, 2
RATE, DECAY, BETAS, MAX_NORM = 1e-3, 0.1, (0.9, 0.95), 1.0
BESIDE = {  # what each is measured against
    "stageline 1f1b": ("torch Schedule1F1B", "deepspeed"),
    "stageline zb-v": ("torch ScheduleZBVZeroBubble",),
    "stageline auto": ("torch Schedule1F1B", "torch ScheduleZBVZeroBubble", "deepspeed"),
}


# What a job does, in a process of its own.


class Turns:
    """Waits for a job's turn before every few steps, and says when they are done."""

    def __init__(self, steps: int, tell: int) -> None:
        self.steps, self.made, self.tell, self.used = steps, -WARMUP, tell, 0.0

    def before_step(self, loss: float | None = None) -> bool:
        """Come here before every step; False when there are no more turns."""
        if self.made == -WARMUP or (self.made >= 0 and self.made % self.steps == 0):
            used = time.process_time() - self.used
            os.write(self.tell, json.dumps({"cpu": used, "loss": loss}).encode() + b"\n")
            if sys.stdin.readline().strip() != "go":
                return False
            self.used = time.process_time()
        self.made += 1
        return True


def model() -> GPT:
    return GPT(WORDS, LENGTH, DIM, LAYERS, HEADS)


class Embed(nn.Module):
    """The GPT before its first block."""

    def __init__(self, whole: GPT) -> None:
        super().__init__()
        self.tokens, self.positions = whole.tokens, whole.positions

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))


def pieces(folder: Path) -> list[nn.Module]:
    """The model of all, as embedding, blocks and head."""
    whole = model()
    whole.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    return [Embed(whole), *whole.blocks, nn.Sequential(whole.norm, whole.head)]


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": DECAY},
        {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=1e-8, fused=True)


def batches(folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    return ((part[0], part[1]) for part in torch.from_numpy(np.load(folder / "batches.npy")))


def sum_of_losses(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / TOKENS


def run_stageline(rank: int, folder: Path, schedule: str, turns: Turns) -> None:
    from stageline.train.config import Config
    from stageline.train.trainer import Trainer

    class Paced(Trainer):
        def _one_step(self) -> None:
            if not turns.before_step(self._loss):
                os._exit(0)
            super()._one_step()

    settings = [*job_settings(folder), f"job.dump_folder={folder / schedule}"]
    settings += ["parallelism.pipeline_parallel_degree=2", f"parallelism.pipeline_parallel_schedule={schedule}"]
    if schedule != "auto":  # the same cut as the others have
        settings += ["parallelism.pipeline_parallel_split=parameters"]
    Paced(Config.read(None, *settings)).run()


def job_settings(folder: Path) -> list[str]:
    return [
        "training.dataset=memmap", f"training.dataset_path={folder / 'tokens.npy'}", f"training.seq_len={LENGTH}",
        f"training.local_batch_size={BATCH}", f"parallelism.pipeline_parallel_microbatch_size={SIZE}",
        f"model.dim={DIM}", f"model.n_layers={LAYERS}", f"model.n_heads={HEADS}", f"training.max_norm={MAX_NORM}",
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
    made = [pipelining.PipelineStage(stages[index], index, len(stages), cpu) for index in mine]
    kind: Any = getattr(pipelining.schedules, name)
    schedule = kind(made if many else made[0], MICROBATCHES, loss_fn=sum_of_losses, scale_grads=False)
    parameters = [each for index in mine for each in stages[index].parameters()]
    optimizer = make_optimizer(parameters)
    last, loss = len(stages) - 1 in mine, None
    for inputs, targets in batches(folder):
        if not turns.before_step(loss):
            os._exit(0)
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        schedule.step(*([inputs] if 0 in mine else []), **given)
        square = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]) ** 2
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
        if not turns.before_step(loss):
            os._exit(0)
        loss = float(
            engine.train_batch(iter(zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)))
        )


KINDS: dict[str, Callable[[int, Path, str, Turns], None]] = {
    "stageline": run_stageline, "torch": run_torch, "deepspeed": run_deepspeed,
}  # fmt: skip


def work(job: str, rank: int, folder: Path, steps: int, tell: int) -> None:
    torch.set_num_threads(1)
    kind, _, what = job.partition(" ")
    KINDS[kind](rank, folder, what, Turns(steps, tell))


# What the jobs are led by.


class Job:
    """Two processes that train when they are told."""

    def __init__(self, name: str, python: str, folder: Path, steps: int) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        common |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
        common |= (
            {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
            if python == sys.executable
            else {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "src")}
        )
        self.name, self.processes, self.ears, self.log = name, [], [], folder / f"{name}.log"
        with self.log.open("wb") as log:
            for rank in range(2):
                ear, tell = os.pipe()
                command = [python, __file__, "--work", name, str(rank), str(folder), str(steps), str(tell)]
                self.processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[tell], cwd=folder,
                        env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    )
                )  # fmt: skip
                os.close(tell)
                self.ears.append(os.fdopen(ear))

    def hear(self) -> list[dict[str, Any]]:
        """Wait until both have nothing to do."""
        said = [ear.readline() for ear in self.ears]
        if not all(said):
            raise RuntimeError(f"{self.name} ended too early:\n{self.log.read_text()[-3000:]}")
        return [json.loads(line) for line in said]

    def turn(self) -> tuple[float, float, float]:
        """Let it make its steps: seconds, CPU seconds and the loss."""
        began = time.perf_counter()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        said = self.hear()
        losses = [each["loss"] for each in said if each["loss"] is not None]
        return time.perf_counter() - began, sum(each["cpu"] for each in said), losses[-1]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for ear in self.ears:
            ear.close()


def prepare(folder: Path, steps: int) -> None:
    """Weights, tokens and batches, as this job would draw them."""
    from stageline.model.build import build
    from stageline.train.config import Config
    from stageline.train.data import Loader, open_data

    np.save(folder / "tokens.npy", open_data(Config()).train.array[:2_000_000])  # type: ignore[union-attr]
    data = open_data(Config.read(None, *job_settings(folder)))
    loader = Loader(data.train, batch=BATCH, seed=0)
    made = [torch.stack(loader.batch(BATCH * step)).numpy() for step in range(steps)]
    np.save(folder / "batches.npy", np.stack(made))
    torch.save(build(model, seed=0).state_dict(), folder / "weights.pt")


def deepspeed_python(given: str) -> str:
    """A python that has DeepSpeed; in a folder it is made if need be."""
    if Path(given).is_file():
        return str(Path(given).absolute())
    python = Path(given).absolute() / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", given], check=True)
        wanted = [f"torch=={torch.__version__.partition('+')[0]}", "deepspeed", "numpy"]
        environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True, env=environment)
    return str(python)


def measure(pythons: dict[str, str], rounds: int, steps: int) -> dict[str, list[tuple[float, float, float]]]:
    """Seconds, CPU seconds and the loss of every turn of every job."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in pythons}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageline-speed-")))
        prepare(folder, WARMUP + rounds * steps + 1)
        jobs = []
        for name, python in pythons.items():
            jobs.append(Job(name, python, folder, steps))
            stack.callback(jobs[-1].close)
            jobs[-1].hear()  # one after the other, so that profiles are not disturbed
            jobs[-1].turn()  # the warm-up
        for number in range(rounds):
            first = number % len(jobs)
            for job in jobs[first:] + jobs[:first]:
                taken[job.name].append(job.turn())
    return taken


def summary(taken: dict[str, list[tuple[float, float, float]]], steps: int) -> dict[str, Any]:
    """Medians and ratios; an error if the losses are not those of the same training."""
    losses = {name: turns[-1][2] for name, turns in taken.items()}
    if max(losses.values()) - min(losses.values()) > 1e-3 * max(losses.values()):
        raise RuntimeError(f"these are not the same training: the last losses are {losses}")
    rows = {
        name: {
            "tokens/s": statistics.median(steps * TOKENS / each[0] for each in turns),
            "CPU ms a step": 1e3 * statistics.median(each[1] for each in turns) / steps,
            "loss": losses[name],
        }
        for name, turns in taken.items()
    }
    ratios = [
        {"job": name, "against": peer,
         "times": statistics.median(b[0] / a[0] for a, b in zip(taken[name], taken[peer], strict=True)),
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
    given = parser.parse_args()
    names = [*BESIDE, *dict.fromkeys(peer for peers in BESIDE.values() for peer in peers)]
    pythons = dict.fromkeys(names, sys.executable)
    missing = ""
    try:
        if not given.deepspeed:
            raise LookupError("give --deepspeed, a python that has it or a folder to make one in")
        pythons["deepspeed"] = deepspeed_python(given.deepspeed)
    except (LookupError, subprocess.CalledProcessError) as error:
        missing = str(error)
        del pythons["deepspeed"]
    found = summary(measure(pythons, given.rounds, given.steps), given.steps)
    if given.json:
        print(json.dumps(found | {"not measured": {"deepspeed": missing} if missing else {}}, indent=2))
        return
    print(f"torch {found['torch']}, {LAYERS} blocks of width {DIM}, {BATCH} × {LENGTH} tokens in {MICROBATCHES} "
          f"microbatches, two processes; load {found['load']:.1f}")  # fmt: skip
    for name, row in found["jobs"].items():
        print(f"{name:28} {row['tokens/s']:6.0f} tokens/s  {row['CPU ms a step']:6.0f} ms of CPU a step  "
              f"loss {row['loss']:.4f}")  # fmt: skip
    for row in found["ratios"]:
        print(f"{row['job']:16} {row['times']:.2f} times {row['against']:28} {row['times, by CPU']:.2f} by CPU")
    if missing:
        print(f"{'deepspeed':28} not measured: {missing}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
