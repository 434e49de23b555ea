"""Snapshots of several parts in one flat dictionary, and the forms of their arrays."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedkeep.core.protocols import DescribedState, Stateful
from fedkeep.core.types import ArraySpec, State, StateSpec


def spec_bytes(spec: StateSpec) -> int:
    """Add up the most bytes that a state of this form can take.

    Examples
    --------
    >>> spec_bytes({"sum": ArraySpec((4,), np.float64), "round": ArraySpec((), np.int64)})
    40
    """
    return sum(array.nbytes for array in spec.values())


def find_spec(spec: StateSpec, name: str) -> ArraySpec | None:
    """Find the form of the array of that name; None if the spec has none."""
    if name in spec:
        return spec[name]
    patterns = (pattern for pattern in spec if pattern.endswith("*"))
    return next((spec[p] for p in patterns if name.startswith(p[:-1])), None)


def learned(spec: StateSpec) -> StateSpec:
    """Mark all arrays as meaning nothing under another model."""
    return {name: replace(array, learned=True) for name, array in spec.items()}


def drop_misfits(state: State, spec: StateSpec) -> tuple[State, list[str]]:
    """Leave out the arrays that have not the form they should have.

    A snapshot taken under other options may hold arrays of another length or type.

    Returns
    -------
    tuple of State and list of str
        What fits, and the names of what does not; arrays that the spec does not know are left out
        silently.

    Examples
    --------
    >>> spec = {"sum": ArraySpec((2,), np.float64)}
    >>> drop_misfits({"sum": np.zeros(3), "old": np.zeros(1)}, spec)
    ({}, ['sum'])
    """
    known = {name: (array, find_spec(spec, name)) for name, array in state.items()}
    fitting = {
        name: array
        for name, (array, form) in known.items()
        if form is not None and (name not in spec or form.fits(array))
    }
    misfits = [n for n, (_, form) in known.items() if form is not None and n not in fitting]
    return fitting, sorted(misfits)


def drop_learned(state: State, spec: StateSpec) -> State:
    """Leave out the arrays that mean nothing under another model."""
    return {
        name: array
        for name, array in state.items()
        if (form := find_spec(spec, name)) is None or not form.learned
    }


def spec_parts(parts: Mapping[str, DescribedState]) -> StateSpec:
    """Collect the forms of all parts' arrays, named as `snapshot_parts` names them."""
    return {
        f"{name}.{key}": form
        for name, part in parts.items()
        for key, form in part.state_spec().items()
    }


def complete_parts(parts: Mapping[str, DescribedState], state: State) -> tuple[State, list[str]]:
    """Complete a state of several parts: a part of which an array is missing begins anew.

    Returns
    -------
    tuple of State and list of str
        The state with all that the parts need, and the names of the arrays that were missing.
    """
    whole: State = {}
    missing: list[str] = []
    for name, part in parts.items():
        spec, own = part.state_spec(), strip_prefix(name, state)
        needed = {key for key, form in spec.items() if not form.optional and not key.endswith("*")}
        if not needed <= own.keys():
            missing += [f"{name}.{key}" for key in needed - own.keys()]
            own = {key: spec[key].fresh() for key in needed}
        whole |= add_prefix(name, own)
    return whole, missing


def add_prefix(name: str, state: State) -> State:
    """Put every name of a state under `name`.

    Examples
    --------
    >>> add_prefix("meter", {"counts": np.zeros(2)})
    {'meter.counts': array([0., 0.])}
    """
    return {f"{name}.{key}": array for key, array in state.items()}


def strip_prefix(name: str, state: State) -> State:
    """Take what stands under `name`, by the names it had before.

    Examples
    --------
    >>> strip_prefix("meter", {"meter.counts": np.zeros(2), "round": np.array(7)})
    {'counts': array([0., 0.])}
    """
    start = f"{name}."
    return {key.removeprefix(start): array for key, array in state.items() if key.startswith(start)}


def snapshot_parts(parts: Mapping[str, Stateful]) -> State:
    """Take the snapshots of all parts, each under its name."""
    return {
        key: array
        for name, part in parts.items()
        for key, array in add_prefix(name, part.snapshot()).items()
    }


def restore_parts(parts: Mapping[str, Stateful], state: State) -> None:
    """Give every part what stands under its name.

    Examples
    --------
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
    """Put numbered states side by side, each name behind its number and a slash."""
    return {
        f"{number}/{name}": array
        for number, state in states.items()
        for name, array in state.items()
    }


def take_numbered(state: State) -> dict[int, State]:
    """Take what `put_numbered` put there, by number.

    Examples
    --------
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
    """Write numbers by device as two columns, in the order of the devices' ids.

    Examples
    --------
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
    """Read what `put_table` wrote under that name."""
    return dict(
        zip(state[f"{name}.devices"].tolist(), state[f"{name}.values"].tolist(), strict=True)
    )
