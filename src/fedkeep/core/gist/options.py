"""The options of a gist, the table `gist` of every configuration."""

from dataclasses import dataclass
from typing import Literal

from fedkeep.core.bounds import check_range
from fedkeep.core.gist.codec import Encoding


@dataclass(frozen=True)
class GistOptions:
    """`gist`: whether devices keep a gist of their stream, and how they use it."""

    name: Literal["none", "local", "shared"] = "none"
    """`local` sends nothing that plain federated averaging does not; `shared` sends each gist to the server, which
    sends back the fleet's: it also corrects the drift between devices."""
    kappa: float = 0.5
    """How far steps turn from the device's gist to the fleet's (`shared`), as trust and `fading` allow."""
    fading: float = 3.0
    """The power of the likeness that `kappa` is multiplied by, beside the trust: the higher, the sooner it fades where
    models move far between two participations."""
    matched: bool = True
    """Compare stream and store label by label: without it, a window of one label is taken for the whole world."""
    memory: float = 100.0
    """The most samples a gist counts for: the more, the steadier, and the slower to follow a drift."""
    contrast: float = 10.0
    """How much labels differ, for those that are not stored: the variance of their mean gradients over a sample's."""
    encoding: Encoding = "float32"
    """How the gist is kept: `int8` takes a quarter of the bytes, with a scale for every 64 numbers."""
    last_layers: int | None = None
    """Let the gist cover the last layers only; None: all that are valued."""

    def __post_init__(self) -> None:
        check_range(self, "kappa", least=0, most=1)
        check_range(self, "fading", least=0)
        check_range(self, "memory", "last_layers", least=1)
        check_range(self, "contrast", above=0)

    @property
    def kept(self) -> bool:
        """Whether there is a gist at all."""
        return self.name != "none"

    @property
    def shared(self) -> bool:
        return self.name == "shared"
