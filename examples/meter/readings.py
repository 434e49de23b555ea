"""Heat meters of twelve flats: the next hour's use in kWh, from what is measured now."""

import json
from collections.abc import Iterator

import numpy as np


def read() -> Iterator[tuple[str, list[float], float]]:
    """Yield flat, features and kWh, from autumn into winter; each flat loses heat in its way."""
    rng = np.random.default_rng(0)
    for hour in range(400):
        for flat in range(12):
            outside = 15 - hour / 20 + rng.normal(0, 3)
            people, sun = float(rng.integers(0, 4)), rng.random()
            loss = 0.05 + 0.01 * flat
            used = max(0.0, loss * (20 - outside) - 0.1 * people - 0.4 * sun) + rng.gamma(2, 0.05)
            yield f"flat-{flat}", [outside, people, sun, float(flat)], used


if __name__ == "__main__":
    for flat, x, y in read():
        if flat == "flat-3":
            print(json.dumps({"x": x, "y": y}))
