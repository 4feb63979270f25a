"""What may be done about a lost rank, and how often. Needs no torch, so that a config is checked at once."""

from __future__ import annotations

from dataclasses import dataclass

from stageline.common.errors import StagelineError, nearest, shorten

ACTIONS = ("restart", "spare", "shrink_replicas", "replan")
"""What may be done about a lost rank."""


@dataclass(frozen=True)
class Recovery:
    """What a launcher does about a lost rank: how often, and which actions it may take, in their order.

    >>> Recovery(max_restarts=3).on_loss
    ('restart', 'spare')
    """

    max_restarts: int = 0
    on_loss: tuple[str, ...] = ("restart", "spare")
    spares: int = 0
    """Processes that wait to take the place of a lost rank."""

    def __post_init__(self) -> None:
        for name, value in (("max_restarts", self.max_restarts), ("spares", self.spares)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise StagelineError(f"{name} must be an integer >= 0; got {shorten(value)}")
        for error in action_errors(self.on_loss):
            raise StagelineError(f"on_loss {error}")
        if self.spares and not self.max_restarts:
            raise StagelineError(
                f"spares is {self.spares}, but spare processes are used only if max_restarts is above 0; it is 0"
            )

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
    return [f"has {action!r}{nearest(action, ACTIONS)}; it may have {', '.join(ACTIONS)}" for action in unknown]
