"""Running ranks in a test: refusals, and the environment of ranks that share a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

import stageline as sl
from stageline.distributed.bootstrap import has_own_gpu
from stageline.testing import run_ranks, shared_gpu


def environment(rank: int) -> dict[str, str]:
    return dict(os.environ)


@pytest.mark.parametrize("options", [{"share_gpu": True}, {"backend": "mpi"}])
def test_options_that_do_not_fit_are_refused(options: Any) -> None:
    with pytest.raises(sl.StagelineError, match='share_gpu needs "nccl"; got backend='):
        run_ranks(environment, 2, **options)


def test_ranks_on_the_host_get_no_environment_of_a_gpu() -> None:
    for seen in run_ranks(environment, 2):
        assert "NCCL_HOSTID" not in seen


def test_every_rank_that_shares_a_gpu_is_a_machine_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = [shared_gpu(rank) for rank in range(4)]
    assert len({seen["NCCL_HOSTID"] for seen in environments}) == 4
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert all(has_own_gpu({**seen, "WORLD_SIZE": "4"}) for seen in environments)
