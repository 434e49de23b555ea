"""Budgets raised and lowered over a full store: each time all samples stay, or nothing changed."""

from pathlib import Path

import numpy as np

from fedkeep.core.errors import ConfigError
from tests.agent.builders import feed, make_agent


def resize(folder: Path, times: int, seed: int = 0) -> tuple[int, int]:
    """How many budgets were tried, and how often a sample was missing afterwards."""
    rng, lost = np.random.default_rng(seed), 0
    assembly = make_agent(folder)
    feed(assembly.agent, 0, 3 * assembly.agent.device.capacity)
    held = set(assembly.agent.store.stored().batch.ids.tolist())
    assembly.disk.close()
    last = 100_000
    for number in range(times):
        budget = int(rng.integers(70_000, 300_000))
        try:
            assembly = make_agent(folder, store={"budget": budget})
            last = budget
        except ConfigError:
            assembly = make_agent(folder, store={"budget": last})
        found = set(assembly.agent.store.stored().batch.ids.tolist())
        lost += len(held - found) > 0
        if number % 5 == 4:  # and full again
            feed(assembly.agent, 10_000 * number, 2 * assembly.agent.device.capacity)
            found = set(assembly.agent.store.stored().batch.ids.tolist())
        held = found
        assembly.disk.close()
    return times, lost
