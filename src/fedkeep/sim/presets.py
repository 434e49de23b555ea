"""Named sets of defaults: where paper, authors' code and evidence disagree (docs/deviations.md).

Under each preset, `*` holds for every policy and a policy's own entry goes before it; an experiment's own keys go
before both.
"""

from __future__ import annotations

from fedkeep.config import Table

PRESETS: dict[str, dict[str, Table]] = {
    "default": {
        "ode": {
            "policy": {"choice": "drawn"},
            "storage": {"after_use": "renew"},
            "weights": {"client_label": 1.0},
            "estimator": {"name": "participants"},
        },
    },
    "paper": {
        "*": {
            "storage": {"after_use": "keep", "revalue": True},
            "weights": {"client_label": 0.0},
            "estimator": {"name": "incremental", "cold_start": "none"},
            "stream": {"shuffle": True},
            "train": {"decay": 0.95},
        },
    },
    "authors": {
        "*": {
            "storage": {"after_use": "keep", "revalue": True},
            "coordinator": {"clients_per_label": 1_000_000},
            "weights": {"client_label": 0.0},
            "estimator": {"name": "participants", "cold_start": "exact"},
            "stream": {"shuffle": False},
            "train": {"decay": 1.0},
        },
        "reservoir": {"policy": {"restart": True}},
        "fedbalancer": {"policy": {"variant": "authors"}},
        "sld": {"policy": {"variant": "authors"}},
    },
}
