"""What a secure sum costs: CPU seconds and bytes, for a device and for the server; a tenth of the devices drops out.

python benchmarks/secure_sum.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from fedkeep.privacy.secure_sum import MaskingDevice, SumServer

SIZES = ((10, 850), (10, 44_426), (25, 850), (50, 850), (50, 44_426))
WORDS = np.dtype(np.uint32)


def measure(count: int, size: int) -> dict[str, float]:
    """One sum over `count` devices of `size` integers each, checked against the plain sum."""
    threshold, dropped = count * 2 // 3 + 1, count // 10
    devices = {i: MaskingDevice(i, b"benchmark", threshold) for i in range(count)}
    server = SumServer(b"benchmark", threshold, size, WORDS)
    start = time.process_time()
    roster = server.open({i: device.keys() for i, device in devices.items()})
    sent = {i: device.share(roster) for i, device in devices.items()}
    shared = time.process_time()
    envelopes, words = server.route(sent), np.arange(size, dtype=WORDS)
    for i in range(dropped, count):
        server.receive(i, devices[i].mask(words, envelopes[i]))
    masked = time.process_time()
    unmaskings = {i: devices[i].unmask(server.survivors()) for i in server.survivors()}
    unmasked = time.process_time()
    total = server.total(unmaskings)
    ended = time.process_time()
    if not np.array_equal(total, words * np.uint32(count - dropped)):
        raise SystemExit("the sum is wrong")
    left = count - dropped
    return {
        "devices": count,
        "words": size,
        "dropped": dropped,
        "device_s": (shared - start) / count + (masked - shared) / left + (unmasked - masked) / left,
        "device_kB": (sum(map(len, sent[0].values())) + WORDS.itemsize * size) / 1e3,
        "clear_kB": WORDS.itemsize * size / 1e3,
        "server_s": ended - unmasked,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten devices only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = [measure(count, size) for count, size in (SIZES[:1] if options.quick else SIZES)]
    print("devices  words  dropped  a device: s      kB  in the clear kB  server: s")
    for r in runs:
        print(
            f"{r['devices']:7} {r['words']:6} {r['dropped']:8} {r['device_s']:12.3f} {r['device_kB']:7.1f}"
            f" {r['clear_kB']:16.1f} {r['server_s']:10.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
