"""The CSV both ways: schedules made here run in torch's own runtime, and torch's own orders verify here."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

import stageline as sl

WORLD = 3
WIDTH = 8
ROWS = 2
"""Rows of one microbatch."""
DEADLINE = 500.0
"""Seconds after which ranks that still run are killed; all cases together take about ten."""


@dataclass(frozen=True)
class Case:
    """One schedule to run in torch, written as CSV by the parent and loaded by every rank."""

    family: str
    ranks: int
    microbatches: int
    options: dict[str, int] = field(default_factory=dict)

    def make(self) -> sl.Schedule:
        return sl.schedule(self.family, self.ranks, self.microbatches, **self.options)

    def __str__(self) -> str:
        options = "".join(f"-{name}{value}" for name, value in self.options.items())
        return f"{self.family}{options}-p{self.ranks}-m{self.microbatches}"


TRAINED = (
    *("gpipe", "1f1b", "eager-1f1b", "interleaved", "interleaved-zb", "looped-bfs", "hanayo"),
    *("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"),
)
TWO_WAY = ("chimera", "dualpipe")
"""They hold each stage on two ranks, which torch's CSV cannot express."""

CASES = [
    *(Case(family, 2, 5) for family in TRAINED),
    *(Case(family, 3, 6) for family in TRAINED),
    Case("interleaved", 3, 7, {"chunks": 3}),
    Case("interleaved-zb", 2, 3, {"chunks": 3}),
    Case("hanayo", 2, 4, {"waves": 2}),
    Case("1f1b", 3, 2),  # fewer microbatches than ranks, which torch's own 1F1B refuses
    Case("zb-v", 3, 2),
]


# What every rank runs, and what it is compared with.


def make_parts(stages: int) -> list[torch.nn.Module]:
    """One small module per stage, the same in every process."""
    torch.manual_seed(stages)
    return [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64), torch.nn.Tanh()) for _ in range(stages)
    ]


def make_batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatches)
    x, y = torch.randn((2, microbatches * ROWS, WIDTH), dtype=torch.float64, generator=generator)
    return x, y


def gradients_of(part: torch.nn.Module, stage: int) -> dict[str, torch.Tensor]:
    gradients = {}
    for name, parameter in part.named_parameters():
        assert parameter.grad is not None, f"stage {stage} has no gradient of {name}"
        gradients[f"{stage}.{name}"] = parameter.grad
    return gradients


def plain_loop(stages: int, microbatches: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gradients and losses of the same model on one device, microbatch after microbatch."""
    parts = make_parts(stages)
    x, y = make_batch(microbatches)
    losses = []
    for microbatch in range(microbatches):
        mine = slice(microbatch * ROWS, (microbatch + 1) * ROWS)
        output = x[mine]
        for part in parts:
            output = part(output)
        loss = torch.nn.functional.mse_loss(output, y[mine])
        (loss / microbatches).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    gradients: dict[str, torch.Tensor] = {}
    for stage, part in enumerate(parts):
        gradients |= gradients_of(part, stage)
    return gradients, torch.stack(losses)


def run_rank(rank: int, folder: Path) -> None:
    """Be one rank of torch's runtime: run every case, leaving a file of gradients for each one."""
    # All traffic stays on the loopback device, and the ranks find each other through a file: no port is open
    # to anyone else.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), WORLD)  # type: ignore[attr-defined]
        limit = timedelta(seconds=300)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
        groups = {ranks: dist.new_group(list(range(ranks)), timeout=limit) for ranks in (2, 3)}
        for case in CASES:
            if rank < case.ranks:
                run_case(case, rank, groups[case.ranks], folder)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        error.add_note(f"(rank {rank})")
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(1)


def run_case(case: Case, rank: int, group: Any, folder: Path) -> None:
    schedule = sl.read_schedule(folder / f"{case}.csv")
    held = schedule.placement.stages_of(rank)
    parts = make_parts(schedule.stages)
    stages = [PipelineStage(parts[stage], stage, schedule.stages, torch.device("cpu"), group=group) for stage in held]
    # With scale_grads, torch divides the summed gradients by the number of microbatches.
    runtime = theirs._PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        stages, case.microbatches, loss_fn=torch.nn.MSELoss(), scale_grads=True
    )
    runtime._load_csv(str(folder / f"{case}.csv"), format="compute_only")
    x, y = make_batch(case.microbatches)
    losses: list[torch.Tensor] = []
    inputs = [x] if 0 in held else []
    runtime.step(*inputs, target=y if schedule.stages - 1 in held else None, losses=losses)
    gradients: dict[str, torch.Tensor] = {}
    for stage in held:
        gradients |= gradients_of(parts[stage], stage)
    if losses:
        gradients["losses"] = torch.stack(losses).detach()
    aside = folder / f"{case}-{rank}.part"
    torch.save(gradients, aside)
    aside.rename(folder / f"{case}-{rank}.pt")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases in one set of processes, which have all ended after it; name the folder with what they left."""
    folder = tmp_path_factory.mktemp("torch")
    for case in CASES:
        case.make().write(folder / f"{case}.csv")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, folder), daemon=True) for rank in range(WORLD)]
    end = time.monotonic() + DEADLINE
    try:
        for process in ranks:
            process.start()
        running = list(ranks)
        while running and time.monotonic() < end:
            wait([process.sentinel for process in running], timeout=max(0.0, end - time.monotonic()))
            if any(process.exitcode not in (None, 0) for process in ranks):
                break  # the others would wait for it
            running = [process for process in running if process.exitcode is None]
    finally:
        ends = ", ".join(f"{rank}: {process.exitcode}" for rank, process in enumerate(ranks))
        (folder / "exits.txt").write_text(
            f"exit code of each rank (None: killed for waiting): {ends}", encoding="utf-8"
        )
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exported_schedule_trains_in_torch(case: Case, finished: Path) -> None:
    files = [finished / f"{case}-{rank}.pt" for rank in range(case.ranks)]
    if not all(file.exists() for file in files):
        errors = "\n".join(file.read_text(encoding="utf-8") for file in sorted(finished.glob("e*.txt")))
        pytest.fail(f"torch's runtime did not get through this case\n{errors}", pytrace=False)
    gradients: dict[str, torch.Tensor] = {}
    for file in files:
        gradients |= torch.load(file, weights_only=True)
    losses = gradients.pop("losses")
    expected, expected_losses = plain_loop(case.make().stages, case.microbatches)
    torch.testing.assert_close(gradients, expected)
    torch.testing.assert_close(losses, expected_losses)


# torch's own orders, dumped by torch.


def torch_order(
    name: str, ranks: int, chunks: int, microbatches: int, path: Path, format: str = "compute_only"
) -> sl.Schedule:
    """Let torch make a schedule and dump it, and read it here. For that, torch reads only the sizes of the stages."""
    held: list[Any] = [
        SimpleNamespace(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            stage_index=chunk * ranks,
            is_first=chunk == 0,
            is_last=False,
            submod=None,
            has_backward=True,
        )
        for chunk in range(chunks)
    ]
    torch_schedule = theirs.get_schedule_class(name)(held, microbatches)
    if format == "compute_comms":
        torch_schedule._prepare_schedule_with_comms(torch_schedule.pipeline_order)
        torch_schedule._dump_csv(str(path))
    else:
        torch_schedule._dump_csv(str(path), format=format)
    return sl.read_schedule(path)


SIZES = [(1, 2), (2, 4), (2, 5), (3, 2), (3, 8), (4, 8), (4, 10), (5, 15), (8, 4), (8, 24)]
"""Ranks and microbatches; for interleaved orders, torch requires microbatches that split into equal rounds."""


def check_order(schedule: sl.Schedule, ranks: int, chunks: int, microbatches: int) -> sl.Certificate:
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (ranks, ranks * chunks, microbatches)
    certificate = sl.verify(schedule)
    assert sl.simulate(schedule).makespan > 0
    return certificate


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"])
def test_torch_loop_orders_verify(name: str, ranks: int, chunks: int, microbatches: int, tmp_path: Path) -> None:
    if name != "LoopedBFS" and microbatches % max(1, microbatches // ranks):
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            torch_order(name, ranks, chunks, microbatches, tmp_path / "a.csv")
        return
    schedule = torch_order(name, ranks, chunks, microbatches, tmp_path / "a.csv")
    certificate = check_order(schedule, ranks, chunks, microbatches)
    assert schedule.placement.table.tolist() == [list(range(ranks)) * chunks]
    # torch's LoopedBFS runs the last microbatch backward first: that is not an error.
    assert certificate.in_order == (name != "LoopedBFS")


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_torch_vee_orders_verify(name: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    if name == "DualPipeV" and microbatches < 2 * ranks:
        with pytest.raises(ValueError, match="at least as many microbatches as stages"):
            torch_order(name, ranks, 2, microbatches, tmp_path / "a.csv")
        return
    schedule = torch_order(name, ranks, 2, microbatches, tmp_path / "a.csv")
    certificate = check_order(schedule, ranks, 2, microbatches)
    assert schedule.placement.table.tolist() == [[*range(ranks), *reversed(range(ranks))]]
    assert certificate.in_order
    assert schedule == sl.schedule(name, ranks, microbatches), "the alias means the same order"


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 2), (4, 12), (8, 16)])
def test_interleaved_is_torchs_order_in_whole_groups(
    ranks: int, chunks: int, microbatches: int, tmp_path: Path
) -> None:
    schedule = torch_order("Interleaved1F1B", ranks, chunks, microbatches, tmp_path / "a.csv")
    assert schedule == sl.schedule("Interleaved1F1B", ranks, microbatches, chunks=chunks)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (3, 6)])
@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"]
)
def test_the_computation_is_read_out_of_a_file_with_communication(
    name: str, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    """`_dump_csv` writes `compute_comms` unless told otherwise."""
    plain = torch_order(name, ranks, 2, microbatches, tmp_path / "plain.csv")
    full = torch_order(name, ranks, 2, microbatches, tmp_path / "full.csv", format="compute_comms")
    moves = ["UNSHARD", "RESHARD"] + (["SEND_F", "RECV_F", "SEND_B", "RECV_B"] if ranks > 1 else [])
    assert all(word in (tmp_path / "full.csv").read_text() for word in moves)
    assert full == plain
    assert sl.verify(full).in_channel_order


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD", "0F0 0B0"),
        ("RECV_F,0F0,SEND_F,RECV_B0,0I0,0W0,REDUCE_GRAD", "0F0 0I0 0W0"),
        ("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0SEND_F2,0B1,0B2", "0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2"),
        ("0F0,(0RECV_B0;0B0)OVERLAP_F_B", "0F0 0B0"),
    ],
)
def test_cells_of_communication_are_skipped(cells: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(cells + "\n")
    assert " ".join(map(str, sl.read_schedule(tmp_path / "a.csv").programs[0])) == expected


@pytest.mark.parametrize("cell", ["0SEND", "0SEND_FF", "0UNSHARDED", "SEND_F0 0F0", "0REDUCE", "(0F0;0B0)OVERLAP"])
def test_cells_of_nothing_known_are_still_refused(cell: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"0F0,{cell},0B0\n")
    with pytest.raises(sl.ScheduleError, match="cannot read"):
        sl.read_schedule(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ScheduleGPipe", "gpipe"),
        ("Schedule1F1B", "1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("ScheduleLoopedBFS", "looped-bfs"),
        ("ScheduleInterleavedZeroBubble", "interleaved-zb"),
        ("ScheduleZBVZeroBubble", "zb-v"),
        ("ScheduleDualPipeV", "dualpipe-v"),
    ],
)
def test_the_names_of_torchs_classes_and_of_its_map_are_accepted(name: str, family: str) -> None:
    assert hasattr(theirs, name)
    short = name.removeprefix("Schedule")
    assert theirs.get_schedule_class(short) is getattr(theirs, name)
    for alias in (name, name.lower(), name.upper(), short, short.lower(), getattr(theirs, name)):
        schedule = sl.schedule(alias, 2, 4)
        assert schedule == sl.schedule(family, 2, 4)
        assert schedule.name == family
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    pipe = sl.Pipeline(
        model, loss_fn=nn.functional.mse_loss, schedule=getattr(theirs, name), ranks=2, microbatches=4
    )  # fmt: skip
    assert pipe.schedule.name == family
    with pytest.raises(sl.ScheduleError, match="no schedule family is named 'int'"):
        sl.Pipeline(model, loss_fn=nn.functional.mse_loss, schedule=int, ranks=2, microbatches=4)


# The file itself.


def own_families() -> list[str]:
    """The families of the package: other tests may have declared more."""
    return sorted(name for name, family in sl.families().items() if family.make.__module__.startswith("stageline."))


def test_every_family_is_covered() -> None:
    assert {*TRAINED, *TWO_WAY, "forward-only"} == set(own_families())


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (3, 7), (4, 8), (8, 21)])
@pytest.mark.parametrize("family", [name for name in own_families() if name not in TWO_WAY])
def test_csv_round_trip(family: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    schedule = sl.schedule(family, ranks, microbatches)
    path = tmp_path / "a.csv"
    schedule.write(path)
    back = sl.read_schedule(path)
    assert back.programs == schedule.programs
    assert back.placement.table.tolist() == schedule.placement.table.tolist()
    assert back.placement.direction.tolist() == schedule.placement.direction.tolist()
    assert back == schedule
    assert back.training == (family != "forward-only")
    again = tmp_path / "b.csv"
    back.write(again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("family", TWO_WAY)
def test_two_directions_have_no_csv(family: str, tmp_path: Path) -> None:
    schedule = sl.schedule(family, 4, 8)
    with pytest.raises(sl.ScheduleError, match=r"every stage is on two ranks.*one rank per stage.*\.json") as caught:
        schedule.write(tmp_path / "a.csv")
    assert caught.value.rule == "format"
    assert family in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    schedule.write(tmp_path / "a.json")
    assert sl.read_schedule(tmp_path / "a.json") == schedule
