"""Ranks on a Ray cluster of two nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stageline as sl
from stageline.cli.app import run
from stageline.distributed.launchers.launcher import Job
from stageline.testing import exercise_launcher
from support import ray_rank

hosts = [pytest.mark.host_matrix, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def test_a_launcher_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(sl.StagelineError, match=r"the launcher ray needs ray.*pip install 'stageline\[ray\]'"):
        sl.launch(os.getpid, processes=1, launcher="ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with two slots each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", "240")
        patch.setenv("OMP_NUM_THREADS", "1")
        node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        nodes = Cluster(initialize_head=True, head_node_args=node)
        try:
            nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
            nodes.wait_for_nodes()
            ray.init(address=nodes.address, logging_level="WARNING")
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


class TestCluster:
    pytestmark = hosts

    def test_it_conforms(self, cluster: Any) -> None:
        from stageline.distributed.launchers.ray import RayLauncher

        exercise_launcher(RayLauncher(patience=1.0), timeout=300.0)

    def test_ranks_on_two_nodes_compute_the_gradients_of_threads(self, cluster: Any) -> None:
        from stageline.distributed.launchers.ray import RayLauncher

        [(_, whole)] = sl.launch(ray_rank.gradients, processes=2, launcher="threads")
        results = sl.launch(ray_rank.gradients, processes=2, launcher=RayLauncher(strategy="STRICT_SPREAD"))
        parts: dict[str, torch.Tensor] = {}
        for number, (place, own) in enumerate(results):
            assert (place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"], place["GROUP_RANK"]) == ("0", "1", str(number))
            parts |= own
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[name], whole[name]) for name in whole)

    def test_a_lost_rank_is_an_error(self, cluster: Any, tmp_path: Path) -> None:
        with pytest.raises(sl.LaunchError, match=r"^rank 1 of 2 was lost on host ") as caught:
            sl.launch(ray_rank.step_until_killed, str(tmp_path), processes=2, launcher="ray", timeout=300)
        assert "\n" not in str(caught.value)

    def test_too_many_ranks_are_refused(self, cluster: Any) -> None:
        with pytest.raises(sl.StagelineError, match=r"^5 ranks need 1 CPU each, but the Ray cluster has 4 such slots"):
            sl.launch(os.getpid, processes=5, launcher="ray")
        from stageline.distributed.launchers.ray import RayLauncher

        launcher = RayLauncher(strategy="STRICT_PACK", wait=1.0)
        with pytest.raises(sl.StagelineError, match=r"not have 3 free slots within 1 s"):
            launcher.run(Job(os.getpid, processes=3))

    def test_the_command_runs_scripts(
        self, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        Path("job.py").write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)")
        assert run(["launch", "--launcher", "ray", "-n", "2", "job.py"]) == 3
        assert "stageline launch: rank 1 of 2 ended with exit code 3\n" in capfd.readouterr().err
        assert run(["launch", "--launcher", "ray", "--logs", "logs", "job.py"]) == 2

    def test_training_recovers_from_a_lost_rank_with_the_same_bits(self, cluster: Any, tmp_path: Path) -> None:
        from stageline.train.ray_trainer import RayTrainer

        settings = [
            "training.steps=6", "training.local_batch_size=8", "training.loss=mse", "checkpoint.interval=2",
            "validation.enable=false", "parallelism.pipeline_parallel_degree=2", "comm.train_timeout_seconds=60",
            "parallelism.pipeline_parallel_schedule=1f1b",
        ]  # fmt: skip

        def losses(name: str, after: int) -> tuple[list[int], list[float]]:
            config = sl.Config.read(None, *settings, f"job.dump_folder={tmp_path / name}")
            (tmp_path / name).mkdir()
            loss_fn = ray_rank.DyingLoss(tmp_path / f"{name}", after)
            steps: dict[int, float] = {}
            trainer = RayTrainer(
                config, processes=2, max_restarts=1, model=ray_rank.build, loss_fn=loss_fn, data=ray_rank.samples()
            )
            result = trainer.run(lambda step, stats: steps.setdefault(step, stats.loss))
            assert result.why == "finished"
            return list(steps), list(steps.values())

        undisturbed = losses("whole", after=10**6)
        assert undisturbed[0] == [1, 2, 3, 4, 5, 6]
        assert losses("killed", after=14) == undisturbed
        assert (tmp_path / "killed" / "died").read_text() == "1"

    def test_values_that_ranks_report_are_kept_on_the_host_of_the_launcher(self, cluster: Any) -> None:
        """On another host, they would be lost with it, though no rank was there."""
        import ray

        from stageline.distributed.launchers.ray import _Reports

        reports = [_Reports(ray, print) for _ in range(5)]
        nodes = {ray.get(own.actor.__ray_call__.remote(ray_rank.node_of)) for own in reports}
        assert nodes == {ray.get_runtime_context().get_node_id()}
        for own in reports:
            own.close()

    def test_the_self_test_passes(self, cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
        assert run(["selftest", "--launcher", "ray", "-n", "2", "--families", "1f1b,zb-v"]) == 0
        assert "started by Ray" in capfd.readouterr().out

    def test_ray_train_keeps_its_place(self, cluster: Any, tmp_path: Path) -> None:
        pytest.importorskip("ray.train.torch", exc_type=ImportError)
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        TorchTrainer(
            ray_rank.loop_of_ray_train,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()
        [(_, whole)] = sl.launch(ray_rank.gradients, processes=2, launcher="threads")
        parts = torch.load(tmp_path / "rank-0.pt") | torch.load(tmp_path / "rank-1.pt")
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[name], whole[name]) for name in whole)

    def test_training_recovers_from_a_lost_node(self, cluster: Any, tmp_path: Path) -> None:
        from stageline.distributed.launchers.ray import RayLauncher

        node = next(node for node in cluster.worker_nodes)
        mark = tmp_path / "mark"
        outcomes = RayLauncher(
            strategy="SPREAD", max_restarts=1, patience=2.0, on_report=lambda _: _lose(cluster, node)
        ).run(Job(ray_rank.wait_or_return, (str(mark),), processes=2, timeout=400))
        assert [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)] == [0, 1]


def _lose(cluster: Any, node: Any) -> None:
    if node in cluster.worker_nodes:
        cluster.remove_node(node, allow_graceful=False)
