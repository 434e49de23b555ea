"""An experiment from Python: two policies on the embedded task, and what they stored."""

import numpy as np

import fedkeep
from fedkeep.sim.fleet import SimulatedFleet

for name in (
    "fifo",
    "balanced-reservoir",
):  # `balanced-reservoir` is the default, and comes with the gist
    experiment = fedkeep.Experiment.from_table(
        {
            "task": {"name": "demo", "devices": 20},
            "storage": {"capacity": 10},
            "policy": {"name": name},
            "train": {"rounds": 100, "participation": 0.2, "learning_rate": 0.05},
        }
    )
    simulator = fedkeep.Simulator(experiment)
    for record in simulator.run():
        if record.evaluation:
            print(f"{name:18} round {record.round:3}: {record.evaluation.accuracy:.1%}")
    fleet = simulator.parts.fleet
    assert isinstance(fleet, SimulatedFleet)
    labels = np.concatenate([device.store.stored().batch.y for device in fleet.devices.values()])
    print(
        f"{name:18} stores, per label: {np.bincount(labels, minlength=simulator.parts.data.labels)}"
    )
