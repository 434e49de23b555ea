"""What an encrypted plan costs: sealed profiles (fedkeep's), and ranked ones (CKKS).

    python benchmarks/encrypted_plan.py [--quick] [--json FILE]

Prints bytes and seconds of CPU: of one device, of the server, and of the key-holder for the plan.
Sealed plans are checked against the plain plan. CKKS plans are checked against the plain greedy
plan on their grid, without local search.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.types import FloatArray, IntArray, Profile
from fedkeep.flower.codec import decode_encrypted_profile, encode
from fedkeep.keyholder.sealing import seal
from fedkeep.keyholder.service import AskKey, AskPlan, KeyReply, KeyService
from fedkeep.protocol.addresses import Address
from fedkeep.protocol.messages import EncryptedProfiled, ProfileRequest
from fedkeep.protocol.wire import from_bytes, to_bytes

Result = TypeVar("Result")
Run = dict[str, Any]
CKKS = ((10, 10), (50, 10), (50, 20))
SEALED = (*CKKS, (1_000, 10), (10_000, 100))
QUICK = ((5, 4), (10, 5))


def timed(action: Callable[[], Result]) -> tuple[Result, float]:
    """The result, and the CPU seconds over all threads that it took."""
    start = time.process_time()
    return action(), time.process_time() - start


def fleet_of(devices: int, labels: int) -> tuple[IntArray, FloatArray]:
    rng = np.random.default_rng(devices * labels)
    velocities = rng.lognormal(0, 0.5, (devices, labels)) * (rng.random((devices, labels)) < 0.5)
    return rng.integers(5, 20, devices), velocities


def sealed(devices: int, labels: int) -> Run:
    """Sealed profiles: the server forwards each answer; the key-holder opens them, and plans."""
    capacities, velocities = fleet_of(devices, labels)
    service = KeyService(X25519PrivateKey.generate(), Address("127.0.0.1", 0), None)
    service.close()
    issued: Any = service.answer(to_bytes(AskKey()), "benchmark")
    request = ProfileRequest(issued.key, issued.nonce)
    profiles = [Profile(int(capacities[device]), velocities[device]) for device in range(devices)]
    answers, sealing = timed(
        lambda: [seal(issued.key, replace(request, device=d), p) for d, p in enumerate(profiles)]
    )
    contents = [
        encode(EncryptedProfiled(answer, issued.nonce, d)) for d, answer in enumerate(answers)
    ]

    def relay() -> bytes:
        read = (decode_encrypted_profile(content, labels) for content in contents)
        sealed_profiles = {device: reply.profile for reply, device in read}
        return to_bytes(AskPlan(issued.nonce, labels, sealed_profiles, Greedy()))

    question, relaying = timed(relay)
    reply, planning = timed(lambda: to_bytes(service.answer(question, "benchmark")))
    plan, following = timed(lambda: from_bytes(reply, KeyReply).plan)
    plain, clear = timed(lambda: Greedy().plan(FleetProfiles.numbered(capacities, velocities)))
    equal = bool(
        (plan.quotas == plain.quotas).all() and (plan.label_weights == plain.label_weights).all()
    )
    return {
        "device_bytes": len(answers[0]),
        "device_s": sealing / devices,
        "server_s": relaying + following,
        "plan_s": planning,
        "plain_plan_s": clear,
        "equal": equal,
    }


def encrypted(scheme: Any, devices: int, labels: int) -> Run:
    """CKKS: the server adds and compares unread values; the key-holder reads signs and totals."""
    from fedkeep.keyholder.ranking import Comparisons, Contexts, OrderedFleet

    capacities, velocities = fleet_of(devices, labels)
    holder, comparisons, encrypting, size = Contexts(scheme), Comparisons(devices, labels), 0.0, 0
    public = holder.public()

    def answers() -> Iterator[list[bytes]]:
        nonlocal encrypting, size
        for row, velocity in enumerate(velocities):
            answer, took = timed(partial(public.encrypt, comparisons, row, velocity))
            encrypting, size = encrypting + took, sum(map(len, answer))
            yield answer

    tables, both = timed(lambda: public.compare(answers()))
    greedy = Greedy(improve_up_to=0)
    plan, planning = timed(
        lambda: holder.plan(comparisons, tables, (np.arange(devices), capacities), greedy)
    )
    levels = scheme.level_of(velocities).astype(np.float64)
    on_grid = OrderedFleet(np.arange(devices), capacities, levels, velocities.sum(axis=0))
    plain, clear = timed(lambda: greedy.plan(on_grid))
    return {
        "device_bytes": size,
        "device_s": encrypting / devices,
        "server_s": both - encrypting,
        "plan_s": planning,
        "plain_plan_s": clear,
        "equal": bool((plan.quotas == plain.quotas).all()),
    }


def jobs(quick: bool) -> Iterator[tuple[str, tuple[int, int], Callable[[int, int], Run]]]:
    """The ways, the sizes of fleets they are tried on, and how each is measured."""
    yield from (("sealed", size, sealed) for size in (QUICK if quick else SEALED))
    if find_spec("tenseal") is None:
        print("CKKS is left out: install tenseal, of the homomorphic extra")
        return
    from fedkeep.keyholder.ranking import COARSE, Scheme

    for way, scheme in (
        (("CKKS, coarse", COARSE),)
        if quick
        else (("CKKS, coarse", COARSE), ("CKKS, full", Scheme()))
    ):
        yield from ((way, size, partial(encrypted, scheme)) for size in (QUICK if quick else CKKS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small fleets, and of CKKS the coarse scheme only"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    print(
        "way           devices labels   a device: bytes         s   server: s"
        "   plan: s   plain: s  equal"
    )
    for way, size, measure in jobs(options.quick):
        run = {"way": way, "devices": size[0], "labels": size[1], **measure(*size)}
        runs.append(run)
        print(
            f"{way:13} {size[0]:7} {size[1]:6} {run['device_bytes']:17,} {run['device_s']:9.4f}"
            f" {run['server_s']:11.3f} {run['plan_s']:9.3f} {run['plain_plan_s']:10.3f}"
            f"  {run['equal']}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
