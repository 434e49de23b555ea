"""The state kit: snapshots of several parts side by side in one flat dictionary, each under its name and a dot."""

from collections.abc import Mapping

import numpy as np

from fedkeep.core.protocols import Stateful
from fedkeep.core.types import State


def add_prefix(name: str, state: State) -> State:
    """The state with every name under `name`.

    >>> add_prefix("meter", {"counts": np.zeros(2)})
    {'meter.counts': array([0., 0.])}
    """
    return {f"{name}.{key}": array for key, array in state.items()}


def strip_prefix(name: str, state: State) -> State:
    """What stands under `name`, by the names it had before; nothing if there is nothing.

    >>> strip_prefix("meter", {"meter.counts": np.zeros(2), "round": np.array(7)})
    {'counts': array([0., 0.])}
    """
    start = f"{name}."
    return {key.removeprefix(start): array for key, array in state.items() if key.startswith(start)}


def snapshot_parts(parts: Mapping[str, Stateful]) -> State:
    """The snapshots of all parts, each under its name."""
    return {
        key: array
        for name, part in parts.items()
        for key, array in add_prefix(name, part.snapshot()).items()
    }


def restore_parts(parts: Mapping[str, Stateful], state: State) -> None:
    """Gives every part what stands under its name.

    >>> from fedkeep.core.velocity import VelocityMeter
    >>> one, other = VelocityMeter(regions=2), VelocityMeter(regions=2)
    >>> one.observe(np.array([0, 1, 1]), time=0.0)
    >>> restore_parts({"meter": other}, snapshot_parts({"meter": one}))
    >>> other.velocity().tolist()
    [1.0, 2.0]
    """
    for name, part in parts.items():
        part.restore(strip_prefix(name, state))


def put_numbered(states: Mapping[int, State]) -> State:
    """The states of numbered things side by side, each name behind its number and a slash."""
    return {
        f"{number}/{name}": array
        for number, state in states.items()
        for name, array in state.items()
    }


def take_numbered(state: State) -> dict[int, State]:
    """What `put_numbered` put there, by number.

    >>> take_numbered({"7/counts": np.zeros(2), "seen": np.array(1)})
    {7: {'counts': array([0., 0.])}}
    """
    found: dict[int, State] = {}
    for key, array in state.items():
        number, slash, name = key.partition("/")
        if slash:
            found.setdefault(int(number), {})[name] = array
    return found


def put_table(name: str, table: Mapping[int, float]) -> State:
    """Numbers by device as two columns, in the order of the devices' ids.

    >>> put_table("rates", {7: 0.5, 3: 2.0})
    {'rates.devices': array([3, 7]), 'rates.values': array([2. , 0.5])}
    """
    devices = sorted(table)
    columns = {
        "devices": np.array(devices, dtype=np.int64),
        "values": np.array([table[d] for d in devices], float),
    }
    return add_prefix(name, columns)


def take_table(name: str, state: State) -> dict[int, float]:
    """What `put_table` wrote under that name."""
    return dict(
        zip(state[f"{name}.devices"].tolist(), state[f"{name}.values"].tolist(), strict=True)
    )
