"""The options of a gist, the table `gist` of every configuration."""

from dataclasses import dataclass
from typing import Literal

from fedkeep.core.bounds import check_range
from fedkeep.core.gradients.codec import Encoding, SumEncoding
from fedkeep.core.gradients.layout import AUTO_RANK, GradientLayout, sketched_layout, whole_layout
from fedkeep.core.protocols import Learner


@dataclass(frozen=True)
class GistOptions:
    """`gist`: whether devices keep a gist of their stream, and how they use it."""

    mode: Literal["none", "local", "shared"] = "none"
    """`local` sends nothing that plain federated averaging does not; `shared` sends each gist to
    the server, which sends back the fleet's: it also corrects the drift between devices."""
    drift_weight: float = 0.5
    """Strength of the drift term of `shared`, from the device's gist towards the fleet's, 0 to 1.

    It is multiplied by beta and by the cube of the gradient correlation rho.
    """
    label_matching: bool = True
    """Whether stream and store are compared label by label; without it all samples count as one
    label."""
    max_ess: float = 100.0
    """The largest effective sample size: the larger, the less noise, and the slower to follow a
    drift."""
    encoding: Encoding | None = None
    """How the gist is kept: `int8` takes a quarter of the bytes, `int4` an eighth, each with a
    scale for every 64 numbers, and the window's sum 16 bits. None: `int8` for a sketch, else
    `float32`."""
    rank: int | Literal["auto"] | None = None
    """Keep a sketch of this rank of each large weight; "auto": a rank of 16; None: every number."""
    last_layers: int | None = None
    """Let the gist cover the last layers only; None: all that are valued."""

    def __post_init__(self) -> None:
        check_range(self, "drift_weight", least=0, most=1)
        check_range(self, "max_ess", "last_layers", least=1)
        if isinstance(self.rank, int):
            check_range(self, "rank", least=1)

    @property
    def kept(self) -> bool:
        """Whether there is a gist at all."""
        return self.mode != "none"

    @property
    def used_rank(self) -> int:
        """The rank of sketches; 0 where every number is kept."""
        return AUTO_RANK if self.rank == "auto" else self.rank or 0

    @property
    def used_encoding(self) -> Encoding:
        """How the gist is kept: by default a sketch in `int8`, a whole gist in `float32`."""
        return self.encoding or ("int8" if self.used_rank else "float32")

    @property
    def window_encoding(self) -> SumEncoding:
        """How the window's sum is kept: in 16 bits beside a gist that has fewer."""
        return "int16" if self.used_encoding in ("int8", "int4") else "float32"

    def layout(self, learner: Learner) -> GradientLayout:
        """Lay out the gist of a learner's gradients: whole, or large weights as sketches."""
        if not self.used_rank:
            return whole_layout(learner.tail(self.last_layers))
        return sketched_layout(learner.gradient_shapes(self.last_layers), self.used_rank)
