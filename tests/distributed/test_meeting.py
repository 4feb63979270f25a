"""How ranks meet at a store."""

from __future__ import annotations

import json

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import stageline as sl
from stageline.distributed.meeting import Meeting


class SlowRank(HashStore):
    """A store in which the other rank reads its answer only after rank 0 has looked for that a few times."""

    looks = 0

    def check(self, keys: list[str]) -> bool:
        if "heard" not in keys[0]:
            return bool(super().check(keys))
        self.looks += 1
        return self.looks > 3


def test_rank_0_stays_until_a_rank_of_another_version_knows_why_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGELINE_HOST", "127.0.0.1")
    store = SlowRank()
    store.set("stageline/hello/1", json.dumps({"name": "1a", "address": "", "versions": "stageline 0", "tls": False}))
    with pytest.raises(sl.StagelineError, match=r"rank 1 runs stageline 0, but rank 0 runs stageline "):
        Meeting(store, 0, 2).answer(lambda: False)
    assert store.looks > 3, "the store may end with rank 0"
    assert json.loads(store.get("stageline/answer/1a"))["versions"] != "stageline 0"
