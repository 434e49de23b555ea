"""Plans from profiles that the server cannot read, and what every party refuses."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.coordination import Greedy
from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.core.fleet import Fleet
from fedkeep.core.types import Profile
from fedkeep.keyholder import ckks
from fedkeep.keyholder.ckks import COARSE, Scheme
from fedkeep.keyholder.order import Comparisons, Grid
from fedkeep.keyholder.parties import (
    EncryptedFleet,
    KeyDirectory,
    KeyHolder,
    PublicContext,
    encrypt_profile,
    read_public_context,
    rows_that_fit,
)
from fedkeep.keyholder.port import EncryptedTables
from fedkeep.link.messages import EncryptedProfile

pytest.importorskip("tenseal", reason="needs the privacy extra")

DEVICES = (3, 5, 8, 13, 34)
LABELS = 3
GREEDY = Greedy(clients_per_label=2, labels_per_client=2, improve_up_to=0)


@pytest.fixture(scope="module")
def holder() -> KeyHolder:
    return KeyHolder.create(COARSE)


@pytest.fixture(scope="module")
def keys(holder: KeyHolder) -> tuple[PublicContext, PublicContext]:
    return holder.for_server(), holder.for_devices()


def profiles(seed: int) -> dict[int, Profile]:
    """Velocities with many zeros and exact ties, and differences down to one level of the coarse grid."""
    rng = np.random.default_rng(seed)
    velocity = rng.choice([0.0, 0.02, 1.0, 2.0, 4.0, 300.0], size=(len(DEVICES), LABELS))
    capacity = rng.integers(1, 8, len(DEVICES)).tolist()
    return {device: Profile(capacity[i], velocity[i]) for i, device in enumerate(DEVICES)}


def answered(
    keys: tuple[PublicContext, PublicContext], told: Mapping[int, Profile]
) -> tuple[EncryptedFleet, dict[int, EncryptedProfile]]:
    server = EncryptedFleet(keys[0], len(DEVICES), LABELS)
    answers = {
        device: encrypt_profile(keys[1], server.request(DEVICES.index(device)), profile)
        for device, profile in told.items()
    }
    for device, answer in answers.items():
        server.receive(device, answer.row, answer)
    return server, answers


@pytest.fixture(scope="module")
def tables(keys: tuple[PublicContext, PublicContext]) -> EncryptedTables:
    return answered(keys, profiles(0))[0].tables(DEVICES)


@pytest.mark.parametrize("quantities", ["even", "frequent"])
def test_the_plan_equals_the_plain_greedy_plan(holder: KeyHolder, tables: EncryptedTables, quantities: str) -> None:
    greedy = replace(GREEDY, quantities=quantities)
    plan = holder.plan(tables, greedy)
    plain = greedy.plan(Fleet.of(profiles(0)))
    np.testing.assert_array_equal(plan.devices, plain.devices)
    np.testing.assert_array_equal(plan.quotas, plain.quotas)
    np.testing.assert_allclose(plan.label_weights, plain.label_weights, rtol=1e-6)
    assert plan.mass_per_slot == pytest.approx(plain.mass_per_slot, rel=1e-6)
    assert plan.shortfalls == plain.shortfalls


def test_devices_that_do_not_answer_are_left_out(holder: KeyHolder, keys: tuple[PublicContext, PublicContext]) -> None:
    some = {device: profile for device, profile in profiles(2).items() if device in (5, 13)}
    server, _ = answered(keys, some)
    plan = holder.plan(server.tables(some), GREEDY)
    np.testing.assert_array_equal(plan.quotas, GREEDY.plan(Fleet.of(some)).quotas)
    assert plan.devices.tolist() == sorted(some)


def test_the_server_cannot_decrypt_what_it_gets(keys: tuple[PublicContext, PublicContext]) -> None:
    _, answers = answered(keys, {3: profiles(0)[3]})
    for public in keys:
        with pytest.raises(RefusedError, match="only the key-holder"):
            ckks.decrypt(ckks.read_context(public.summing), answers[3].velocities, LABELS)


def test_the_full_scheme_tells_two_thousand_levels_apart_and_the_coarse_one_thirty() -> None:
    assert Scheme().levels > 2000
    assert COARSE.levels > 30


def test_a_profile_in_the_clear_is_refused_and_the_rest_goes_on(
    holder: KeyHolder, keys: tuple[PublicContext, PublicContext]
) -> None:
    told = profiles(3)
    server, _ = answered(keys, {device: told[device] for device in DEVICES[3:]})
    with pytest.raises(RefusedError, match="profile in the clear"):
        server.receive(DEVICES[0], 0, told[DEVICES[0]])
    assert DEVICES[0] not in holder.plan(server.tables(DEVICES[3:]), GREEDY).devices


def test_ciphertexts_of_another_key_size_or_form_are_refused(
    keys: tuple[PublicContext, PublicContext],
) -> None:
    server, answers = answered(keys, {3: profiles(0)[3]})
    good = encrypt_profile(keys[1], server.request(1), profiles(0)[5])
    foreign = KeyHolder.create(COARSE).for_devices()
    short = ckks.encrypt(ckks.read_context(keys[1].comparing), np.zeros(2))
    small = ckks.encrypt(ckks.read_context(keys[1].summing), np.zeros(9))
    bad = {
        "another context": replace(good, name=foreign.name),
        "unreadable ciphertext": replace(good, comparisons=(good.comparisons[0][:-50],)),
        "empty": replace(good, velocities=b""),
        "wrong size": replace(good, comparisons=(short,)),
        "damaged, or of another": replace(good, comparisons=(small,)),
        "wrong form": replace(good, comparisons=()),
        "or answered": answers[3],
    }
    for reason, answer in bad.items():
        with pytest.raises(RefusedError, match=reason):
            server.receive(3 if reason == "or answered" else 5, answer.row, answer)
    with pytest.raises(RefusedError, match="wrong form"):
        server.receive(5, 1, replace(good, capacity=0))
    with pytest.raises(RefusedError, match="not the row"):
        server.receive(5, 1, replace(good, row=2))
    server.receive(5, 1, good)


def test_a_device_sends_nothing_where_it_cannot_encrypt(keys: tuple[PublicContext, PublicContext]) -> None:
    request, profile = EncryptedFleet(keys[0], len(DEVICES), LABELS).request(0), profiles(0)[3]
    with pytest.raises(RefusedError, match="unreadable encryption context"):
        encrypt_profile(replace(keys[1], comparing=b"none"), request, profile)
    with pytest.raises(RefusedError, match="does not fit"):
        encrypt_profile(keys[1], replace(request, labels=4), profile)
    with pytest.raises(RefusedError, match=r"another key: .*nothing was sent"):
        encrypt_profile(keys[1], replace(request, name=b"of the server's own"), profile)
    context = ckks.SUMS.new_context()
    leaked = context.serialize(save_secret_key=True)
    with pytest.raises(RefusedError, match="leaked key"):
        encrypt_profile(replace(keys[1], summing=leaked), request, profile)


def test_a_saved_key_decrypts_and_a_lost_one_is_refused(tmp_path: Path) -> None:
    directory = KeyDirectory(tmp_path / "keys")
    saved = directory.create(COARSE)
    assert {(tmp_path / "keys" / f"{n}.key").stat().st_mode & 0o777 for n in ("comparing", "summing")} == {0o600}
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    for_server = PublicContext.unpack(directory.for_server.read_bytes())
    tables = answered((for_server, saved), profiles(0))[0].tables(DEVICES)
    restarted = directory.open()
    np.testing.assert_array_equal(restarted.plan(tables, GREEDY).quotas, GREEDY.plan(Fleet.of(profiles(0))).quotas)
    with pytest.raises(RefusedError, match="public key not kept"):
        restarted.for_devices()
    (tmp_path / "keys" / "summing.key").unlink()
    with pytest.raises(RefusedError, match="lost key"):
        directory.open()


def test_the_wrong_key_reads_no_signs(tables: EncryptedTables) -> None:
    with pytest.raises(RefusedError, match="unclear comparison"):
        KeyHolder.create(COARSE).plan(tables, GREEDY)


def test_plans_that_need_more_than_the_order_are_refused(
    holder: KeyHolder, keys: tuple[PublicContext, PublicContext], tables: EncryptedTables
) -> None:
    with pytest.raises(ConfigError, match="quantities must be"):
        holder.plan(tables, replace(GREEDY, quantities="lp"))
    with pytest.raises(ConfigError, match="levels apart"):
        KeyHolder.create(COARSE, Grid(1000))
    with pytest.raises(RefusedError, match="no profiles"):
        EncryptedFleet(keys[0], len(DEVICES), LABELS).tables(())


def test_devices_that_come_and_go_change_the_plan_as_in_the_clear(
    holder: KeyHolder, keys: tuple[PublicContext, PublicContext]
) -> None:
    told = profiles(5)
    server, _ = answered(keys, {device: told[device] for device in DEVICES[1:]})
    first = [told[device] for device in DEVICES[1:]]
    plan = holder.plan(server.tables(DEVICES[1:]), GREEDY)
    plain = GREEDY.plan(Fleet.of(dict(zip(DEVICES[1:], first, strict=True))))
    newcomer = encrypt_profile(keys[1], server.request(server.rows - 1), told[DEVICES[0]])
    server.receive(DEVICES[0], server.rows - 1, newcomer)
    present = DEVICES[:4]
    plan = holder.plan(server.tables(present), GREEDY, plan)
    plain = GREEDY.replan(plain, Fleet.of({device: told[device] for device in present}))
    np.testing.assert_array_equal(plan.devices, plain.devices)
    np.testing.assert_array_equal(plan.quotas, plain.quotas)
    np.testing.assert_allclose(plan.label_weights, plain.label_weights, rtol=1e-6)


@pytest.mark.parametrize(("devices", "labels", "slots"), [(1, 4, 8192), (50, 10, 16384), (60, 10, 16384), (5, 3, 16)])
def test_spare_rows_cost_no_ciphertext(devices: int, labels: int, slots: int) -> None:
    rows = rows_that_fit(devices, labels, slots)
    needed = [-(-len(Comparisons(n, labels).pairs[0]) // slots) for n in (devices, rows, rows + 1)]
    assert rows >= devices
    assert needed[0] == needed[1] < needed[2]


def test_public_keys_are_known_by_their_digest(keys: tuple[PublicContext, PublicContext], tmp_path: Path) -> None:
    path, public = tmp_path / "devices.context", keys[1]
    with pytest.raises(ConfigError, match="are not there"):
        read_public_context(path)
    path.write_bytes(public.pack())
    assert read_public_context(path, public.name.hex()) == public
    with pytest.raises(RefusedError, match="another key-holder"):
        read_public_context(path, "00" * 16)
    path.write_bytes(replace(public, grid=Grid(5)).pack())
    with pytest.raises(RefusedError, match="damaged public keys"):
        read_public_context(path)
    path.write_bytes(b"no keys")
    with pytest.raises(RefusedError, match="unreadable public keys"):
        read_public_context(path)
