"""Named sets of defaults: where paper, authors' code and evidence disagree (docs/deviations.md).

One table for the simulator, the agent and the Flower app, so that the same words mean the same everywhere. Under each
preset, `*` holds for every policy and a policy's own entry goes before it; a configuration's own keys go before both.
"""

from fedkeep.core.registry import find
from fedkeep.tables import Table, merged

DEFAULT = "default"
DEFAULT_POLICY = "balanced-reservoir"

PRESETS: dict[str, dict[str, Table]] = {
    "default": {
        "*": {"aggregation": {"name": "robust"}},
        "balanced-reservoir": {
            "storage": {"after_use": "evict_trained_first"},
            "weights": {"client_label": 1.0},
            "gist": {"mode": "shared"},
        },
        "ode": {
            "policy": {"choice": "drawn"},
            "storage": {"after_use": "evict_trained_first"},
            "weights": {"client_label": 1.0},
            "estimator": {"name": "round-mean"},
        },
    },
    "paper": {
        "*": {
            "aggregation": {"name": "fedavg"},
            "limits": {"enabled": False},
            "storage": {"after_use": "keep", "rescore": True, "quotas": "hard"},
            "coordinator": {"name": "paper-greedy"},
            "weights": {"client_label": 0.0},
            "estimator": {"name": "incremental", "cold_start": "none", "normalise": False},
            "stream": {"shuffle": True},
            "train": {"decay": 0.95},
            "record": {"accuracy": "devices"},
        },
    },
    "authors": {
        "*": {
            "aggregation": {"name": "fedavg"},
            "storage": {"after_use": "keep", "rescore": True, "quotas": "hard"},
            "coordinator": {"clients_per_label": 1_000_000},
            "weights": {"client_label": 0.0},
            "estimator": {"name": "round-mean", "cold_start": "exact"},
            "stream": {"shuffle": False},
            "train": {"decay": 1.0},
        },
        "reservoir": {"policy": {"restart": True}},
        "fedbalancer": {"policy": {"variant": "authors"}},
        "sld": {"policy": {"variant": "authors"}},
    },
}


BALANCED_FIFO: Table = {
    "policy": {"name": "fifo"},
    "coordinator": {"name": "greedy", "applies_to": "all"},
    "storage": {"quotas": "hard"},
    "weights": {"client_label": 1.0},
}
"""The method `balanced-fifo`: the newest samples of each label, in hard quotas from a greedy plan."""


def experiment_tables(preset: str, policy: str) -> Table:
    """What a preset says of a policy, in the tables of an experiment.

    >>> experiment_tables("authors", "reservoir")["policy"]
    {'restart': True}
    """
    said = find(preset, PRESETS, "preset")
    return merged(said.get("*", {}), said.get(policy, {}))
