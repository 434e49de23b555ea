"""How devices train locally over the rounds."""

from dataclasses import dataclass
from math import inf

from fedkeep.core.bounds import check_range
from fedkeep.core.types import LocalTraining


@dataclass(frozen=True)
class Schedule(LocalTraining):
    """Local training whose learning rate falls by `decay` every `decay_every` rounds.

    Examples
    --------
    >>> schedule = Schedule(0.1, epochs=5, decay=0.5)
    >>> [round(schedule.local(round_).learning_rate, 3) for round_ in (0, 99, 100, 200)]
    [0.1, 0.1, 0.05, 0.025]
    """

    decay: float = 0.95
    """What the learning rate is multiplied by every `decay_every` rounds; 1 keeps it."""
    decay_every: int = 100
    """Rounds between two such steps."""

    def __post_init__(self) -> None:
        check_range(self, "learning_rate", above=0, below=inf)
        check_range(self, "epochs", "decay_every", "batch_size", least=1)
        check_range(self, "decay", above=0, most=1)
        check_range(self, "proximal", least=0)

    def local(self, round_: int) -> LocalTraining:
        """Return how devices train in this round."""
        rate = self.learning_rate * self.decay ** (round_ // self.decay_every)
        return LocalTraining(rate, self.epochs, self.batch_size, self.proximal)
