"""A device from a configuration: the one place where simulator, agent and Keeper make theirs."""

from collections.abc import Sequence

import numpy as np

from fedkeep.config.method import MethodConfig
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import Learner, Store
from fedkeep.core.regions import Regions, regions_for
from fedkeep.core.rules.book import RuleBook
from fedkeep.core.rules.store import RuledStore
from fedkeep.core.seeds import child_seed
from fedkeep.core.store import MemoryStore
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import IntArray
from fedkeep.core.velocity import VelocityMeter
from fedkeep.core.waiting import WaitingJournal, WaitingRoom


def build_device(
    method: MethodConfig,
    learner: Learner,
    *,
    capacity: int,
    sample_shape: tuple[int, ...],
    labels: int,
    targets: NumberTargets | None = None,
    regions: Regions | None = None,
    store: Store | None = None,
    meter: VelocityMeter | None = None,
    seed: int = 0,
    draw_seed: int | None = None,
    journal: WaitingJournal | None = None,
    rules: RuleBook | None = None,
) -> Device:
    """Make the device that a configuration describes.

    Parameters
    ----------
    method : MethodConfig
        What it stores, how it counts, and what it exchanges.
    learner : Learner
        The model's gradients and training.
    capacity : int
        The samples that fit, those that wait for labels among them; an experiment says it, an
        agent's budget gives it.
    sample_shape : tuple of int
        The shape of a sample.
    labels : int
        The number of labels.
    targets : NumberTargets, optional
        What targets look like that are numbers to predict; None: they are labels.
    regions : Regions, optional
        What the plan divides; by default what the policy needs.
    store : Store, optional
        Where samples are kept; by default in memory, under the method's rules.
    meter : VelocityMeter, optional
        How the device knows the rates of its stream; by default it counts.
    seed : int
        Of the device's random numbers.
    draw_seed : int, optional
        Of the samples' random keys, where these follow from ids; by default from the order of
        arrival under `seed`.
    journal : WaitingJournal, optional
        What makes durable which samples wait for their labels; by default nothing does.
    rules : RuleBook, optional
        The method's rules, over a store that is given; by default over one in memory.
    """
    privacy, waiting = method.privacy, None
    regions = regions or regions_for(method.policy, labels, targets)
    if method.rules and store is None:
        index = build_memory_store(method, np.zeros(regions.count, dtype=np.int64), labels)
        store, rules = index, build_rules(method, index)
    if rules is not None:
        capacity -= rules.store.reserved
        rules.store.seed = seed if draw_seed is None else draw_seed
        if capacity < 1:
            raise ConfigError(
                f"the rules reserve {rules.store.reserved} slots and leave none of "
                f"{capacity + rules.store.reserved} to the policy: lower their slots"
            )
    if slots := method.waiting.slots(capacity):
        waiting = WaitingRoom(
            method.waiting,
            slots,
            labels if targets is None else 1,
            child_seed(seed, "waiting"),
            None if draw_seed is None else child_seed(draw_seed, "waiting"),
            journal,
        )
    return Device(
        learner,
        method.policy,
        capacity=capacity - slots,
        sample_shape=sample_shape,
        labels=labels,
        targets=targets,
        regions=regions,
        store=store,
        meter=meter,
        after_use=method.storage.rule(),
        weighting=method.weights,
        options=method.storage.device(method.estimator),
        gist=method.gist,
        # Each sample's gradient is clipped before it is summed, as the noise needs it.
        clip=privacy.clip if privacy.protects("estimator") else None,
        seed=seed,
        draw_seed=draw_seed,
        waiting=waiting,
        rules=rules,
    )


def build_memory_store(method: MethodConfig, quotas: IntArray, labels: int = 1) -> MemoryStore:
    """Make the index of a store, under the method's rules."""
    after_use, soft = method.storage.rule(), method.storage.quotas == "soft"
    if method.rules:
        return RuledStore(quotas, after_use, soft_quotas=soft, rules=method.rules, labels=labels)
    return MemoryStore(quotas, after_use, soft_quotas=soft)


def build_rules(
    method: MethodConfig, index: MemoryStore, label_names: Sequence[str] = ()
) -> RuleBook | None:
    """Make what matches a method's rules over a store's index; None where there are none."""
    if not isinstance(index, RuledStore):
        return None
    return RuleBook(method.rules, index, label_names)
