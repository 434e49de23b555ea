"""The task TC: which application a flow of packets belongs to, on the terminals of a mobile network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedkeep.data import flows, ustc
from fedkeep.data.cache import Progress
from fedkeep.data.federation import Federation, ModelSpec, Ownership
from fedkeep.data.partition import Natural, partition_from
from fedkeep.data.split import hold_out


@dataclass(frozen=True)
class Traffic:
    """Generated flows of 64 packets x (size, direction, gap); or the real sessions of USTC-TFC2016."""

    dataset: Literal["generated", "ustc"] = "generated"
    """Flows generated here, or real sessions."""
    devices: int = 30
    """Terminals of the generated network; USTC is divided by `partition`."""
    applications: int = 20
    """Labels of the generated network."""
    applications_per_device: int = 15
    """Labels that a generated terminal uses."""
    samples: int = 37_853
    """Flows to generate."""
    generator_seed: int = 2019
    """What the flows themselves follow from; the experiment's seed draws only splits."""
    test_fraction: float = 0.2
    """Held out in each device for testing."""
    partition: Mapping[str, Any] = field(
        default_factory=lambda: {"name": "dirichlet", "devices": 30, "alpha": 0.3, "minimum": 10}
    )
    """USTC only: it does not say who used the applications."""

    def __post_init__(self) -> None:
        if not 1 <= self.applications_per_device <= self.applications:
            raise ValueError(
                f"applications_per_device must be 1..{self.applications}, got {self.applications_per_device}"
            )
        fewest = 2 * self.devices * self.applications_per_device
        if self.devices < 1 or self.samples < fewest:
            raise ValueError(f"samples must be at least {fewest} for {self.devices} devices, got {self.samples}")
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"test_fraction must be between 0 and 1, got {self.test_fraction}")
        if isinstance(partition_from(self.partition), Natural):
            raise ValueError("partition.name must not be 'natural': USTC-TFC2016 has no devices of its own")

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        return self._ustc(seed, progress) if self.dataset == "ustc" else self._generated(seed)

    def _generated(self, seed: int) -> Federation:
        apps = flows.draw_applications(self.applications, self.generator_seed)
        labels, terminals = flows.draw_usage(
            self.applications, self.devices, self.applications_per_device, self.samples, self.generator_seed
        )
        x = flows.draw_flows(apps, labels, terminals, self.generator_seed)
        train, test = hold_out(Ownership.from_assignment(terminals, self.devices), self.test_fraction, seed)
        names = flows.application_names(self.applications)
        return Federation("traffic", x, labels, train, test, names, ModelSpec("traffic-cnn"), rounds_per_pass=500)

    def _ustc(self, seed: int, progress: Progress | None) -> Federation:
        """Real sessions: 784 bytes as an image of 28x28, so that LeNet fits."""
        x, y = ustc.load_sessions(progress)
        members = partition_from(self.partition).divide(y, None, seed)
        train, test = hold_out(members, self.test_fraction, seed)
        return Federation("traffic", x, y, train, test, ustc.LABELS, ModelSpec("lenet"), rounds_per_pass=500)
