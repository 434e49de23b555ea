"""What a server and its devices must have configured alike, and what to say where they differ.

Devices send their half with the profile. Only what is not at its default is sent, so that an option
that is added later, at its default, makes no device differ. Capacity, encodings, rules of the store
and stricter privacy are a device's own affair.
"""

from collections.abc import Mapping

from fedkeep.config.method import MethodConfig
from fedkeep.core.errors import RejectedError, RejectionReason
from fedkeep.core.targets import NumberTargets
from fedkeep.protocol.wire import VERSION

_MOST_TERMS, _LONGEST = 32, 64
"""More terms, or longer ones, than any release has are not read out."""

DEFAULTS: dict[str, str] = {
    "exchange": "models",
    "gist.mode": "none",
    "gist.last_layers": "all",
    "gist.rank": "whole",
    "regions": "1",
    "weights.client_label": "0",
    "protocol": "1",
    "samples.targets": "class",
    "samples.edges": "[]",
}
"""The terms that must agree, by the key that sets them, each with the value that is not sent."""


def agreement_of(
    method: MethodConfig, regions: int | str, targets: NumberTargets | None = None
) -> dict[str, str]:
    """List the terms of a method that server and devices must have alike.

    Parameters
    ----------
    method : MethodConfig
        A fleet's or a device's method.
    regions : int or str
        The number of regions that a plan divides, or what `region_term` says of them.
    targets : NumberTargets, optional
        What targets look like that are numbers; None: they are labels.

    Returns
    -------
    dict of str to str
        The terms that are not at their default.

    Examples
    --------
    >>> from fedkeep.config.method import parse_method
    >>> agreement_of(parse_method({"policy": {"name": "ode"}, "preset": "paper"}), regions=10)
    {'exchange': 'models and local gradients', 'regions': '10'}
    """
    gist = method.gist
    shared = gist.mode == "shared"
    layout = str(gist.last_layers) if shared and gist.last_layers is not None else "all"
    terms = {
        "exchange": method.exchange.sent,
        "gist.mode": gist.mode,
        "gist.last_layers": layout,
        "gist.rank": str(gist.rank or "whole") if shared else "whole",
        "regions": str(regions),
        "weights.client_label": f"{method.weights.client_label:g}",
        "protocol": str(VERSION),
        "samples.targets": "class" if targets is None else "number",
        "samples.edges": "[]" if targets is None else str(list(targets.edges)),
    }
    return {key: value for key, value in terms.items() if value != DEFAULTS[key]}


def check_agreement(fleet: Mapping[str, str], device: Mapping[str, str] | None) -> None:
    """Reject a device whose terms differ from the fleet's.

    Parameters
    ----------
    fleet : Mapping of str to str
        The server's terms.
    device : Mapping of str to str or None
        The device's; None of an agent of an earlier release, which sends none and is accepted.

    Raises
    ------
    RejectedError
        With every difference in words.

    Examples
    --------
    >>> check_agreement({"regions": "10"}, {"regions": "10"})
    >>> try:
    ...     check_agreement({"regions": "10"}, {})
    ... except RejectedError as error:
    ...     print(error.detail.partition(":")[0])
    regions is '1' on the device, '10' in the fleet
    """
    if device is None:
        return
    if len(device) > _MOST_TERMS:
        raise RejectedError(
            RejectionReason.METHOD_DIFFERS, f"{len(device)} terms; at most {_MOST_TERMS} exist"
        )
    differences = []
    for key in sorted(fleet.keys() | device.keys()):
        default = DEFAULTS.get(key, "not known")
        ours, theirs = fleet.get(key, default), device.get(key, default)
        if ours != theirs:
            shown = f"{key[:_LONGEST]} is '{theirs[:_LONGEST]}' on the device"
            differences.append(f"{shown}, '{ours}' in the fleet")
    if differences:
        words = "; ".join(differences)
        raise RejectedError(
            RejectionReason.METHOD_DIFFERS,
            f"{words}: make the agent's configuration and the fleet's the same",
        )
