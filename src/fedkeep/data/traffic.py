"""The task TC: which application a flow of packets in a mobile network belongs to.

The flows are real, or generated: the first packets of flows of twenty applications on thirty
terminals. Applications are burst processes. Each has a few activities (start-up, browsing,
background sync ...) of very different frequency; an activity is a Markov chain over kinds of
packet, with its own packet sizes and gaps. Applications of one category (video, game, download,
messaging) are variations of one theme, so they overlap. A flow has its own round-trip time and
padding, a terminal its own access line, and a small share of flows is traffic that any application
of the category may cause (advertisements, analytics): no model can tell whose it was.

The constants were set so that the traffic CNN reaches 95-96 % with full data, looking at full data
and FIFO only.

The real flows are sessions of the ten benign applications of USTC-TFC2016, with all that betrays
the capture masked. Each is its first 784 bytes as a pcap file. Unmasked, a model learns addresses,
ports and clocks, that is the capture instead of the application.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.bounds import check_range
from fedkeep.core.planning.assignment import apportion
from fedkeep.core.seeds import generator
from fedkeep.core.types import AnyArray, FloatArray, IntArray
from fedkeep.data.cache import Progress, RemoteFile, obtain, read_idx
from fedkeep.data.federation import Federation, ModelSpec, Ownership, hold_out
from fedkeep.data.partition import Natural, partition_from

PACKETS = 64
CATEGORIES = ("video", "game", "download", "messaging")
_ACTIVITIES = 3
_ACTIVITY_SHARES = np.array([0.6, 0.3, 0.1])
_DIRECTIONS = np.array([1.0, -1.0, 1.0, -1.0])
"""Kinds of packet: request (up), data (down), acknowledgement (up), control (down)."""
_SIZES = np.array([420.0, 1180.0, 70.0, 180.0])
_GAPS = np.array([1.6, 0.4, 0.6, 1.2])
"""Decimal logarithm of the milliseconds before a packet."""
_TENDENCIES = np.array(
    [[0.0, 1.2, 0.3, 0.0], [0.5, -0.5, 0.3, 0.8], [-0.3, 1.6, 0.6, 0.0], [0.3, 0.0, 0.0, 0.6]]
)
"""How much more or less often each category sends each kind: videos are mostly data."""
_CHAIN_VARIATION, _SIZE_VARIATION, _GAP_VARIATION, _SHARED_TRAFFIC = 1.2, 0.8, 0.8, 0.09
_SMALLEST, _LARGEST, _LONGEST_GAP = 40.0, 1500.0, 3.0
_USUAL_SIZE, _USUAL_GAP, _GAP_UNIT = 400.0, 1.4, 0.85
"""Fixed units in which sizes and gaps have a mean near 0 and a standard deviation near 1."""

USTC_LABELS = (
    "BitTorrent", "Facetime", "FTP", "Gmail", "MySQL",
    "Outlook", "Skype", "SMB", "Weibo", "WorldOfWarcraft",
)  # fmt: skip
_ADDRESS = (
    "https://raw.githubusercontent.com/echowei/DeepTraffic/master/1.malware_traffic_classification/"
    "3.PreprocessedResults/10class/Benign/SessionAllLayers/"
)
IMAGES, LABEL_FILE = (
    RemoteFile(
        "ustc-tfc2016",
        f"benign-SessionAllLayers-{name}",
        _ADDRESS + name,
        md5,
        "md5",
        "gzip content",
    )
    for name, md5 in (
        ("t10k-images-idx3-ubyte.gz", "c765b56e034bf79c9fee65bb22c1bf86"),
        ("t10k-labels-idx1-ubyte.gz", "f9d7477577ce121ef4ea123390a54243"),
    )
)
_PCAP_HEADER, _RECORD_HEADER, _ETHERNET = 24, 16, 14
_IPV4, _IPV6, _VLAN = 0x0800, 0x86DD, 0x8100
_TCP, _UDP, _TCP_TIMESTAMP = 6, 17, 8


@dataclass(frozen=True)
class Traffic:
    """Generated flows of 64 packets x (size, direction, gap).

    Or the real sessions of USTC-TFC2016.
    """

    dataset: Literal["generated", "ustc"] = "generated"
    """Flows generated here, or real sessions."""
    devices: int = 30
    """Terminals of the generated network; USTC is divided by `partition`."""
    applications: int = 20
    """Labels of the generated network."""
    applications_per_device: int = 15
    """Labels that a generated terminal uses."""
    samples: int = 37_853
    """Flows to generate."""
    generator_seed: int = 2019
    """What the flows themselves follow from; the experiment's seed draws only splits."""
    test_fraction: float = 0.2
    """Held out in each device for testing."""
    partition: Mapping[str, Any] = field(
        default_factory=lambda: {"name": "dirichlet", "devices": 30, "alpha": 0.3, "minimum": 10}
    )
    """USTC only: it does not say who used the applications."""

    def __post_init__(self) -> None:
        check_range(self, "applications_per_device", least=1, most=self.applications)
        check_range(self, "devices", least=1)
        check_range(self, "samples", least=2 * self.devices * self.applications_per_device)
        check_range(self, "test_fraction", above=0, below=1)
        if isinstance(partition_from(self.partition), Natural):
            raise ValueError(
                "partition.name must not be 'natural': USTC-TFC2016 has no devices of its own"
            )

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        """Load or generate the sessions, divided among the devices."""
        names: tuple[str, ...] = USTC_LABELS
        if self.dataset == "ustc":  # 784 bytes a session as an image of 28x28, so that LeNet fits
            sessions, labels = (read_idx(obtain(file, progress)) for file in (IMAGES, LABEL_FILE))
            masked, y = mask_sessions(sessions.reshape(len(sessions), -1)), labels.astype(np.int64)
            x: AnyArray = (masked.astype(np.float32) / np.float32(255)).reshape(-1, 1, 28, 28)
            members, model = partition_from(self.partition).divide(y, None, seed), "lenet"
        else:  # few applications make most traffic, and each terminal has its own mix
            rng = generator(self.generator_seed, "usage")
            popularity = 1.0 / np.arange(1, self.applications + 1)
            shares = np.zeros((self.devices, self.applications))
            for terminal, activity in enumerate(np.exp(0.6 * rng.normal(size=self.devices))):
                installed = rng.permutation(self.applications)[: self.applications_per_device]
                used = popularity[installed] * np.exp(0.6 * rng.normal(size=len(installed)))
                shares[terminal, installed] = activity * used / used.sum()
            cells = np.flatnonzero(shares)
            cells = np.repeat(cells, apportion(self.samples, shares.ravel()[cells], minimum=2))
            y, terminals = cells % self.applications, cells // self.applications
            x = draw_flows(self.applications, y, terminals, self.generator_seed)
            members, model = Ownership.from_assignment(terminals, self.devices), "traffic-cnn"
            kinds = len(CATEGORIES)  # names like "video-1", the most used applications first
            names = tuple(
                f"{CATEGORIES[n % kinds]}-{n // kinds + 1}" for n in range(self.applications)
            )
        train, test = hold_out(members, self.test_fraction, seed)
        return Federation("traffic", x, y, train, test, names, ModelSpec(model))


def draw_applications(count: int, seed: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Draw the burst processes: chains, packet sizes and gaps.

    Each is (application, activity, kind of packet ...).

    A chain is of cumulated transition probabilities. The `count` applications are in turn of the
    four categories; then comes one process of shared traffic a category.
    """
    rng = generator(seed, "applications")
    kinds, themes = len(_SIZES), len(CATEGORIES)
    theme = np.concatenate([np.arange(count) % themes, np.arange(themes)])
    shape = (len(theme), _ACTIVITIES, kinds)
    theme_logits = _TENDENCIES[:, None, None] + 0.8 * rng.normal(size=(themes, 1, kinds, kinds))
    logits = theme_logits[theme] + _CHAIN_VARIATION * rng.normal(size=(*shape, kinds))
    chains = np.exp(logits)
    chains = np.cumsum(chains / chains.sum(axis=-1, keepdims=True), axis=-1)
    theme_sizes = np.log(_SIZES) + 0.2 * rng.normal(size=(themes, 1, kinds))
    sizes = np.exp(theme_sizes[theme] + _SIZE_VARIATION * rng.normal(size=shape))
    theme_gaps = _GAPS + 0.3 * rng.normal(size=(themes, 1, kinds))
    return chains, sizes, theme_gaps[theme] + _GAP_VARIATION * rng.normal(size=shape)


def draw_flows(applications: int, labels: IntArray, terminals: IntArray, seed: int) -> AnyArray:
    """One flow per label, (n, 3, 64) float32: packet size, direction and gap, in fixed units.

    Sizes are whole bytes and gaps have two decimals, so that processors that differ in a last bit
    agree on the data.
    """
    chains, sizes, gaps = draw_applications(applications, seed)
    rng, n = generator(seed, "flows"), len(labels)
    process = np.where(
        rng.random(n) < _SHARED_TRAFFIC, applications + labels % len(CATEGORIES), labels
    )
    activity = rng.choice(_ACTIVITIES, size=n, p=_ACTIVITY_SHARES)
    padding = np.exp(0.08 * rng.normal(size=n))
    line = generator(seed, "lines").normal(0.0, 0.15, int(terminals.max()) + 1)
    delay = line[terminals] + 0.25 * rng.normal(size=n)
    flows = np.empty((n, 3, PACKETS), dtype=np.float32)
    kind = np.zeros(n, dtype=np.int64)
    for step in range(PACKETS):
        size = sizes[process, activity, kind] * padding * np.exp(0.1 * rng.normal(size=n))
        gap = gaps[process, activity, kind] + delay + 0.35 * rng.normal(size=n)
        flows[:, 0, step] = np.clip(np.round(size), _SMALLEST, _LARGEST) / _USUAL_SIZE - 1
        flows[:, 1, step] = _DIRECTIONS[kind]
        flows[:, 2, step] = (np.clip(np.round(gap, 2), 0.0, _LONGEST_GAP) - _USUAL_GAP) / _GAP_UNIT
        kind = (rng.random(n)[:, None] > chains[process, activity, kind, :-1]).sum(axis=1)
    return flows


def mask_sessions(sessions: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a copy of (n, 784) with zeros where a session identifies its capture."""
    masked = sessions.copy()
    for session in masked:
        session[:_PCAP_HEADER] = 0
        start, length = _PCAP_HEADER, 1
        while start < len(session) and length:
            length = _number(session, start + 8, 4)
            session[start : start + 8] = 0
            start += _RECORD_HEADER
            _mask_frame(session[start : start + length])
            start += length
    return masked


def _mask_frame(frame: NDArray[np.uint8]) -> None:
    frame[:12] = 0
    kind, start = _number(frame, 12, 2), _ETHERNET
    if kind == _VLAN:
        kind, start = _number(frame, 16, 2), _ETHERNET + 4
    packet = frame[start:]
    if kind == _IPV4 and len(packet):
        packet[4:6] = 0
        packet[10:20] = 0
        protocol, segment = _number(packet, 9, 1), packet[4 * int(packet[0] & 0x0F) :]
    elif kind == _IPV6 and len(packet):
        packet[8:40] = 0
        protocol, segment = _number(packet, 6, 1), packet[40:]
    else:
        return
    if protocol == _TCP:
        segment[0:12] = 0
        segment[16:18] = 0
        if len(segment) > 20:
            _mask_tcp_timestamp(segment[20 : 4 * int(segment[12] >> 4)])
    elif protocol == _UDP:
        segment[0:4] = 0
        segment[6:8] = 0


def _mask_tcp_timestamp(options: NDArray[np.uint8]) -> None:
    """Zeroes the clocks of both ends in the TCP options.

    They follow a capture as its record times do.
    """
    at = 0
    while at + 1 < len(options):
        kind, length = int(options[at]), int(options[at + 1])
        if kind == _TCP_TIMESTAMP:
            options[at + 2 : at + 10] = 0
        if kind == 0 or (kind > 1 and length < 2):
            return
        at += 1 if kind == 1 else length


def _number(data: NDArray[np.uint8], at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size].tobytes(), "big")
