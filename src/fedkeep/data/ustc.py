"""USTC-TFC2016, the ten benign applications: real sessions, with all that betrays the capture masked.

Each session is its first 784 bytes as a pcap file. Unmasked, a model learns addresses, ports and clocks, that
is the capture instead of the application.
"""

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.types import AnyArray, IntArray, State
from fedkeep.data.cache import Progress, RemoteFile, obtain, read_idx, remembered

LABELS = (
    "BitTorrent", "Facetime", "FTP", "Gmail", "MySQL", "Outlook", "Skype", "SMB", "Weibo", "WorldOfWarcraft",
)  # fmt: skip
_ADDRESS = (
    "https://raw.githubusercontent.com/echowei/DeepTraffic/master/1.malware_traffic_classification/"
    "3.PreprocessedResults/10class/Benign/SessionAllLayers/"
)
IMAGES, LABEL_FILE = (
    RemoteFile("ustc-tfc2016", f"benign-SessionAllLayers-{name}", _ADDRESS + name, md5, "md5", "gzip content")
    for name, md5 in (
        ("t10k-images-idx3-ubyte.gz", "c765b56e034bf79c9fee65bb22c1bf86"),
        ("t10k-labels-idx1-ubyte.gz", "f9d7477577ce121ef4ea123390a54243"),
    )
)
_PCAP_HEADER, _RECORD_HEADER, _ETHERNET = 24, 16, 14
_IPV4, _IPV6, _VLAN = 0x0800, 0x86DD, 0x8100
_TCP, _UDP, _TCP_TIMESTAMP = 6, 17, 8


def load_sessions(progress: Progress | None = None) -> tuple[AnyArray, IntArray]:
    """Masked sessions (n, 1, 28, 28) as bytes/255, and their labels."""
    images, labels = obtain(IMAGES, progress), obtain(LABEL_FILE, progress)

    def parse() -> State:
        sessions = read_idx(images)
        return {"x": mask_sessions(sessions.reshape(len(sessions), -1)), "y": read_idx(labels)}

    kept = remembered("ustc-tfc2016-benign-1", parse)
    x = kept["x"].astype(np.float32) / np.float32(255)
    return x.reshape(len(x), 1, 28, 28), kept["y"].astype(np.int64)


def mask_sessions(sessions: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of (n, 784) with zeros where a session tells of its capture."""
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
    """Zeroes the clocks of both ends in the TCP options, which follow a capture as its record times do."""
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
