"""The server's view of the key-holder: public keys to compute with, and plans from tables that only it can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep.core.coordination import Coordinator, Greedy
from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.core.plan import Plan
from fedkeep.link.addresses import Address
from fedkeep.link.key_client import KeyHolderClient
from fedkeep.link.key_messages import AskPlan, EncryptedTables, sound_plan
from fedkeep.link.mutual_tls import planner_side
from fedkeep.privacy.public_context import PublicContext


@dataclass(frozen=True)
class KeyHolderOptions:
    """`keyholder`: where the key-holder of encrypted profiles answers."""

    address: str = ""
    """HOST:PORT of `fedkeep keyholder serve`."""
    credentials: str = ""
    """A directory with ca.crt, planner.crt and planner.key, made by `fedkeep provision --key-holder HOST`."""
    insecure: bool = False
    """No TLS: loopback only."""

    def client(self) -> KeyHolderClient:
        if not self.address:
            raise ConfigError(
                "privacy.encrypted-profiles needs keyholder.address: where `fedkeep keyholder serve` runs"
            )
        if self.insecure == bool(self.credentials):
            raise ConfigError("set keyholder.credentials, or keyholder.insecure=true on loopback, and not both")
        tls = None if self.insecure else planner_side(Path(self.credentials))
        return KeyHolderClient(Address.parse(self.address), tls)


class RemotePlanner:
    """Greedy plans, made by the key-holder; other coordinators need velocities, which nobody can read."""

    def __init__(self, client: KeyHolderClient, coordinator: Coordinator) -> None:
        if not isinstance(coordinator, Greedy) or coordinator.quantities == "lp":
            raise ConfigError(
                "encrypted profiles are planned by coordinator 'greedy' with quantities 'even' or 'frequent' only"
            )
        self._client, self._greedy = client, coordinator

    def public_context(self) -> PublicContext:
        """The keys to multiply under encryption: some hundred megabytes, asked for once a table."""
        return PublicContext.unpack(self._client.public_keys().packed)

    def plan(self, tables: EncryptedTables, before: Plan | None) -> Plan:
        """The plan for the devices of the tables; one for others, or for more slots than they have, is refused."""
        greedy = self._greedy
        asked = AskPlan(tables, greedy.quantities, greedy.clients_per_label, greedy.labels_per_client, before)
        plan = sound_plan(self._client.plan(asked).plan)
        present = np.flatnonzero(tables.capacities > 0)
        present = present[np.argsort(tables.devices[present])]
        if not np.array_equal(plan.devices, tables.devices[present]) or plan.quotas.shape[1] != tables.labels:
            raise RefusedError("malformed plan", "it is not for the devices and labels it was asked for")
        if (plan.quotas.sum(axis=1) > tables.capacities[present]).any():
            raise RefusedError("malformed plan", "it asks for more than the devices can store")
        return plan
