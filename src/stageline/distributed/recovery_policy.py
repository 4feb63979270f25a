"""What may be done about a lost rank, and how often. Needs no torch, so that a config is checked at once."""

from __future__ import annotations

from dataclasses import dataclass

from stageline.common.errors import StagelineError, nearest, shorten

ACTIONS = ("restart", "spare", "shrink_replicas", "replan")
"""What may be done about a lost rank."""
BUILT = ("restart", "spare")
"""What this version can do."""


@dataclass(frozen=True)
class Recovery:
    """What a launcher does about a lost rank: how often, and which actions it may take, in their order.

    >>> Recovery(max_restarts=3).on_loss
    ('restart', 'spare')
    """

    max_restarts: int = 0
    on_loss: tuple[str, ...] = ("restart", "spare")

    def __post_init__(self) -> None:
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise StagelineError(f"max_restarts is a number of restarts, at least 0; got {shorten(self.max_restarts)}")
        for error in action_errors(self.on_loss):
            raise StagelineError(f"on_loss {error}")

    @property
    def enabled(self) -> bool:
        """Whether a lost rank is replaced at all."""
        return self.max_restarts > 0 and bool(self.on_loss)


def action_errors(actions: tuple[str, ...]) -> list[str]:
    """What is wrong with a list of actions, one sentence each.

    >>> action_errors(("restart",)), action_errors(("restrat",))
    ([], ["has 'restrat' (did you mean 'restart'?); it may have restart, spare, shrink_replicas, replan"])
    """
    unknown = [action for action in actions if action not in ACTIONS]
    missing = [action for action in actions if action in ACTIONS and action not in BUILT]
    return [
        *(f"has {action!r}{nearest(action, ACTIONS)}; it may have {', '.join(ACTIONS)}" for action in unknown),
        *(f"has {action!r}, which this version cannot do yet; it may have {', '.join(BUILT)}" for action in missing),
    ]
