"""Telling systemd how the agent is doing, by the plain datagrams that it understands; nothing where it does not ask."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress


def notify(message: str) -> None:
    """Sends a line such as `READY=1`; a listener that is gone is no fault of the agent."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_seconds() -> float | None:
    """How often systemd wants to hear from this process; None: it does not watch."""
    period = os.environ.get("WATCHDOG_USEC", "")
    meant = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(period) / 2e6 if period.isdecimal() and meant else None


def watch(alive: Callable[[], bool], stopped: threading.Event) -> None:
    """Says that the agent is alive for as long as it is; training may hold up the stream, and counts as life."""
    period = watchdog_seconds()
    if period is None:
        return

    def tell() -> None:
        while not stopped.wait(period):
            if alive():
                notify("WATCHDOG=1")

    threading.Thread(target=tell, name="watchdog", daemon=True).start()
