"""An agent whose store is divided around centroids: what it stores, and after a restart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.agent.assembly import parse_config
from fedkeep.config.agreement import agreement_of, check_agreement
from fedkeep.config.method import parse_fleet
from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.regions import region_term
from fedkeep.solvers import KMeans
from tests.agent.builders import LABELS, SHAPE, assembled, config_table, feed

WIDTH = int(np.prod(SHAPE))
CENTROIDS = [[-1.0] * WIDTH, [1.0] * WIDTH]
REGIONS = {"name": "k-means", "centroids": CENTROIDS}


def regions_of(agent: Any) -> dict[int, int]:
    stored = agent.store.stored()
    return dict(zip(stored.batch.ids.tolist(), stored.regions.tolist(), strict=True))


def nearest(agent: Any) -> dict[int, int]:
    batch = agent.store.stored().batch
    points = batch.x.reshape(len(batch), -1).astype(np.float64)
    distances = ((points[:, None] - np.array(CENTROIDS)) ** 2).sum(axis=2)
    return dict(zip(batch.ids.tolist(), distances.argmin(axis=1).tolist(), strict=True))


def test_samples_are_stored_by_the_nearest_centroid_and_stay_so(tmp_path: Path) -> None:
    table = config_table(tmp_path, regions=REGIONS)
    assembly = assembled(table)
    assert assembly.agent.device.regions.count == 2
    feed(assembly.agent, 0, 40)
    before = regions_of(assembly.agent)
    assert before == nearest(assembly.agent)
    assert set(before.values()) == {0, 1}
    assembly.disk.close()
    again = assembled(table)
    assert regions_of(again.agent) == before
    again.disk.close()


def fleet_table(**changes: Any) -> dict[str, Any]:
    table: dict[str, Any] = {
        "policy": {"name": "ode"},
        "samples": {"shape": list(SHAPE), "labels": LABELS},
        "regions": REGIONS,
    }
    return {key: value for key, value in {**table, **changes}.items() if value is not None}


def terms(table: dict[str, Any]) -> dict[str, str]:
    spec = parse_fleet(table)
    return agreement_of(spec, region_term(spec.regions))


def test_a_fleet_rejects_a_device_with_other_regions(tmp_path: Path) -> None:
    config = parse_config(config_table(tmp_path, regions=REGIONS))
    device = agreement_of(config.method, region_term(config.regions))
    check_agreement(terms(fleet_table()), device)
    other = {**REGIONS, "centroids": [[0.5] * WIDTH, [1.0] * WIDTH]}
    for changed in (fleet_table(regions=other), fleet_table(regions=None)):
        with pytest.raises(RejectedError, match="regions is '2 around centroids"):
            check_agreement(terms(changed), device)


def test_by_label_is_what_it_was(tmp_path: Path) -> None:
    config = parse_config(config_table(tmp_path))
    assert region_term(config.regions) == str(LABELS)
    assert terms(fleet_table(regions=None))["regions"] == str(LABELS)


@pytest.mark.parametrize(
    ("regions", "sentence"),
    [
        ({"name": "k-means"}, "'regions.centroids' is missing: a fleet's devices use the same"),
        ({**REGIONS, "space": "activations"}, "'regions.space' must be \"features\" in a fleet"),
        ({"name": "hierarchical", "centroids": [[1.0]]}, "must have 6 numbers each, as many as"),
        ({"name": "cube"}, "'regions.name' cannot be 'cube'"),
    ],
)
def test_wrong_regions_are_named(regions: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config(config_table(tmp_path, regions=regions))
    with pytest.raises(ConfigError, match=sentence):
        parse_fleet(fleet_table(regions=regions))


def test_regions_without_a_plan_or_a_balance_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither policy nor coordinator does"):
        parse_fleet(fleet_table(policy={"name": "fifo"}))


def test_devices_find_centroids_without_sending_samples() -> None:
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(0)
    clusters = KMeans(count=2, local=3)
    own = [rng.normal(sign, 0.1, (50, WIDTH)) for sign in (-1, 1, -1)]
    found = clusters.merge([clusters.summarise(points) for points in own])
    assert sorted(round(c[0]) for c in found.centroids or []) == [-1, 1]
    assert found.deployed(WIDTH).count == 2
