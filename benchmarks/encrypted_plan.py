"""What a plan from encrypted profiles costs: per device, per label, for the server and for the key-holder.

    python benchmarks/encrypted_plan.py [--quick] [--json FILE]

Prints seconds of CPU and megabytes; every plan is checked against the plain greedy plan. In large fleets five devices
encrypt and are timed one by one, and the contributions of all others are encrypted as one sum: the server adds fewer
ciphertexts up, with the same numbers in them, and its time is told for all devices.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedkeep.core.coordination import Greedy
from fedkeep.core.fleet import Fleet
from fedkeep.core.types import FloatArray, Profile
from fedkeep.keyholder import ckks
from fedkeep.keyholder.ckks import COARSE, Scheme
from fedkeep.keyholder.order import Comparisons, OrderedFleet
from fedkeep.keyholder.parties import EncryptedFleet, KeyHolder, PublicContext, encrypt_profile
from fedkeep.link.messages import EncryptedProfile

Result = TypeVar("Result")
SIZES = ((10, 10), (25, 10), (50, 10), (50, 20), (100, 10), (200, 10))
QUICK = ((5, 4), (10, 5))
SINGLE = 5
"""How many devices are timed."""


def timed(action: Callable[[], Result]) -> tuple[Result, float]:
    """The result, and the CPU seconds over all threads that it took."""
    start = time.process_time()
    return action(), time.process_time() - start


def rest(public: PublicContext, fleet: EncryptedFleet, velocities: FloatArray) -> EncryptedProfile:
    """One answer that holds the sum of all devices' beyond the first `SINGLE`."""
    rows, labels = fleet.rows, velocities.shape[1]
    comparisons, slots = Comparisons(rows, labels), public.scheme.slots
    levels = public.grid.level_of(velocities) / public.grid.levels
    total = sum((comparisons.contribution(d, levels[d]) for d in range(SINGLE + 1, len(levels))), np.zeros(1))
    total = comparisons.contribution(SINGLE, levels[SINGLE]) + total
    context = ckks.read_context(public.comparing)
    parts = tuple(ckks.encrypt(context, total[at : at + slots]) for at in range(0, len(total), slots))
    summed = ckks.encrypt(ckks.read_context(public.summing), velocities[SINGLE:].sum(axis=0))
    return EncryptedProfile(public.name, SINGLE, 1, parts, summed)


def measure(holder: KeyHolder, scheme: Scheme, devices: int, labels: int) -> dict[str, float | bool | int]:
    """One fleet, planned in secret."""
    rng = np.random.default_rng(devices * labels)
    velocities = rng.lognormal(0, 1.5, (devices, labels)) * (rng.random((devices, labels)) < 0.5)
    capacities = rng.integers(5, 20, devices)
    server = EncryptedFleet(holder.for_server(), devices, labels)
    public, encrypting, receiving, size = holder.for_devices(), 0.0, 0.0, 0
    for device in range(min(SINGLE, devices)):
        profile = Profile(int(capacities[device]), velocities[device])
        answer, took = timed(lambda d=device, p=profile: encrypt_profile(public, server.request(d), p))  # type: ignore[misc]
        encrypting += took / min(SINGLE, devices)
        receiving += timed(lambda d=device, a=answer: server.receive(d, d, a))[1] / min(SINGLE, devices)  # type: ignore[misc]
        size = sum(map(len, answer.comparisons)) + len(answer.velocities)
    if devices > SINGLE:
        server.receive(SINGLE, SINGLE, rest(public, server, velocities))
    tables, comparing = timed(lambda: server.tables(server.answered))
    everybody = np.arange(server.rows)
    filled = np.where(everybody < devices, np.resize(capacities, server.rows), 0)
    plan, planning = timed(lambda: holder.plan(replace(tables, devices=everybody, capacities=filled), Greedy()))
    levels, totals = public.grid.level_of(velocities), velocities.sum(axis=0)
    tied = Greedy(improve_up_to=0).plan(OrderedFleet(np.arange(devices), capacities, levels.astype(float), totals))
    exact = Greedy(improve_up_to=0).plan(Fleet.numbered(capacities, velocities))
    adding = receiving * (devices + max(0, devices - SINGLE - 1))  # read when they come, and when they are added up
    return {
        "devices": devices,
        "labels": labels,
        "levels": scheme.levels,
        "comparisons": Comparisons(devices, labels).count,
        "ciphertexts": len(tables.signs),
        "device_s": encrypting,
        "device_ms_per_label": 1e3 * encrypting / labels,
        "device_MB": size / 1e6,
        "server_add_s": adding,
        "server_compare_s": comparing,
        "server_ms_per_device_and_label": 1e3 * (adding + comparing) / (devices * labels),
        "key_holder_s": planning,
        "equals_plain_plan_on_grid": bool((plan.quotas == tied.quotas).all()),
        "holdings_shared_with_exact_plan": float(((plan.quotas > 0) == (exact.quotas > 0)).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small fleets and the coarse scheme only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    for name, scheme in (("coarse", COARSE),) if options.quick else (("coarse", COARSE), ("full", Scheme())):
        holder, making = timed(lambda s=scheme: KeyHolder.create(s))  # type: ignore[misc]
        server_keys = len(holder.for_server().comparing) / 1e6
        print(f"{name}: {scheme.levels} levels, keys made in {making:.1f} s, {server_keys:.0f} MB for the server")
        print(
            "devices labels comparisons   a device: s  ms/label    MB server: s ms/(device*label)  key-holder s equal"
        )
        for devices, labels in QUICK if options.quick else SIZES:
            run = measure(holder, scheme, devices, labels)
            runs.append({"scheme": name, **run})
            print(
                f"{devices:7} {labels:6} {run['comparisons']:11} {run['device_s']:13.2f}"
                f" {run['device_ms_per_label']:9.0f} {run['device_MB']:5.1f}"
                f" {run['server_add_s'] + run['server_compare_s']:9.1f}"
                f" {run['server_ms_per_device_and_label']:18.1f} {run['key_holder_s']:14.2f}"
                f"  {run['equals_plain_plan_on_grid']}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
