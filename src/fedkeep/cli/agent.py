"""`fedkeep agent`: runs the device agent, and asks a running one."""

import math
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedkeep.agent.record import SampleMetadata
from fedkeep.agent.remote import new_keys, parsed, read_key
from fedkeep.agent.remote import sign as signed
from fedkeep.cli.agent_store import Out, label_name, open_new, store, when, write_samples
from fedkeep.core.errors import ConfigError
from fedkeep.files import atomic_write
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.messages import (
    DriftStatus,
    Erase,
    GistStatus,
    Reason,
    SampleFilter,
    Status,
)
from fedkeep.protocol.printing import printable

agent = typer.Typer(
    help="Keep the best of a stream on this device.", no_args_is_help=True, rich_markup_mode=None
)
agent.add_typer(store, name="store")

Socket = Annotated[
    str,
    typer.Option(
        envvar="FEDKEEP_SOCKET",
        help="The agent's Unix socket (SOCKET#STREAM if it has several).",
    ),
]


Namespace = Annotated[
    str | None,
    typer.Option(help="Only an id of this namespace: a source's name, unless it has set one."),
]


@agent.command()
def run(
    config: Annotated[Path, typer.Argument(help="The agent's TOML file.")],
    until_sources_end: Annotated[
        bool, typer.Option(help="Stop once all sources have ended.")
    ] = False,
) -> None:
    """Read streams, keep what is worth keeping in a store on disk, take part in training."""
    from fedkeep.agent.streams import read_streams  # with all of the agent

    read_streams(config)
    arguments = [
        sys.executable,
        "-m",
        "fedkeep.agent",
        str(config),
        *["--until-sources-end"] * until_sources_end,
    ]
    # The command line's own libraries would stay in memory for as long as the agent runs, so it
    # starts anew.
    os.execve(sys.executable, arguments, {"MALLOC_ARENA_MAX": "1", **os.environ})


@agent.command()
def status(socket: Socket = "fedkeep.sock") -> None:
    """Say how a running agent is doing, or each of its streams."""
    with AgentClient(socket, timeout=30) as client:
        names = client.streams() if "#" not in socket else ("",)
    for name in names:
        if name:
            typer.echo(f"stream   {name}")
        with AgentClient(f"{socket}#{name}" if name else socket, timeout=30) as client:
            _show_status(client.status())


def _show_status(now: Status) -> None:
    """Print how one stream is doing."""
    age = (
        "none yet"
        if now.model_age_seconds is None
        else f"round {now.round}, {_duration(now.model_age_seconds)} old"
    )
    lines = [
        f"samples  {now.samples} of {now.capacity}, labels {now.labels_held} of {now.labels}",
        f"bytes    {now.bytes} of {now.budget}, {now.sample_bytes} per sample",
        f"model    {age}",
        f"policy   {now.policy}, preset {now.preset}",
    ]
    if now.gist is not None:
        lines.append(f"gist     {gist(now.gist)}")
    if (room := now.unlabelled) is not None:
        counts = room.counts
        lines.append(
            f"waiting  {room.samples} of {room.slots} samples without a label, rule {room.rule}; "
            f"of {counts['arrived']} so far {counts['labelled']} were labelled in time, "
            f"{counts['displaced']} displaced, {counts['expired']} expired"
        )
        if room.early_labels:
            lines.append(f"labels   {room.early_labels} came before their samples")
    lines += _privacy(now)
    if now.stride > 1:
        lines.append(
            f"overload the stream is faster than this device: one arrival of {now.stride} is valued"
        )
    lines += _drift(now.drift)
    if now.settings:
        lines.append(f"settings {now.settings}")
    if now.uploads:
        lines.append(f"uploads  {now.uploads}")
    if now.waiting:
        lines.append(f"on hold  {now.waiting}; nothing is valued until then")
    lines += [f"  {name:24} {count}" for name, count in now.counters.items()]
    _print(*lines)


def _drift(drift: DriftStatus) -> list[str]:
    """Return whether the stream has changed or stopped, in words; nothing where neither."""
    lines = []
    if times := sum(drift.changes.values()):
        found = ", ".join(f"{name} {count}" for name, count in drift.changes.items() if count)
        last = ""
        if drift.last_seconds is not None:
            last = f"; {_duration(drift.last_seconds)} ago {drift.last}"
        lines.append(f"changes  {times} of the stream ({found}){last}")
    for source, seconds in drift.silent.items():
        lines.append(f"silent   source '{source}': nothing has come for {_duration(seconds)}")
    return lines


@agent.command()
def show(socket: Socket = "fedkeep.sock") -> None:
    """Show what is stored: per label how many, how large, how valuable and how old."""
    with AgentClient(socket, timeout=30) as client:
        summary, now = client.stored(), client.status()
    table = Table(
        "label", "samples", "bytes", "lowest value", "median", "highest", "oldest", "newest"
    )
    for row in summary.labels:
        values = (f"{value:.4g}" for value in (row.lowest, row.median, row.highest))
        ages = (_duration(row.oldest_seconds), _duration(row.newest_seconds))
        label = printable(row.name) if row.name else str(row.label)
        table.add_row(escape(label), str(row.count), str(row.bytes), *values, *ages)
    Console().print(table, *_privacy(now), sep="\n")


@agent.command()
def refused(socket: Socket = "fedkeep.sock") -> None:
    """Show the records that were refused last, as they came."""
    with AgentClient(socket, timeout=30) as client:
        records = client.refused()
    lines = [
        f"{when(record.time)}  {record.source}  {record.reason}  {record.raw}" for record in records
    ]
    _print(*lines or ["none was refused since the agent started"])


@agent.command()
def why(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The sample's id, as it came.")],
    namespace: Namespace = None,
    socket: Socket = "fedkeep.sock",
) -> None:
    """Say why a sample is stored, or why it is not."""
    with AgentClient(socket, timeout=30) as client:
        reasons, names = client.why(id_, namespace), client.status().label_names
    numbers = reasons.ids or (reasons.id,)
    lines = [
        f"  {when(decision.time)}  "
        + explain(decision, decision.id if decision.id in numbers else reasons.id, names)
        for decision in reasons.decisions
    ]
    if not lines:
        never = "" if reasons.stored or reasons.waits else "it never came, or "
        lines = [f"  no decision on it is remembered: {never}too many came since"]
    where = "stored" if reasons.stored else "not stored"
    head = f"sample {id_} {'waits for its label' if reasons.waits else f'is {where}'}"
    _print(head, *lines)


@agent.command()
def erase(
    id_: Annotated[str | None, typer.Option("--id", help="The sample of this id.")] = None,
    label: Annotated[
        str | None, typer.Option(help="All samples of this label, by number or name.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="All samples from this source.")] = None,
    since: Annotated[
        datetime | None, typer.Option(help="Stored at this time or later, by the device's clock.")
    ] = None,
    until: Annotated[datetime | None, typer.Option(help="Stored at this time or earlier.")] = None,
    namespace: Namespace = None,
    socket: Socket = "fedkeep.sock",
) -> None:
    """Remove samples for good, from the file and from its free space.

    Conditions given together must all hold.
    """
    first, last = (None if time is None else time.timestamp() for time in (since, until))
    request = Erase(id_, label, source, first, last, namespace)
    if namespace is not None and id_ is None:
        raise ConfigError("--namespace says which --id is meant: give that, too, or --source")
    if request == Erase():
        raise ConfigError("say what to erase: --id, --label, --source, --since or --until")
    with AgentClient(socket, timeout=60) as client:
        count = client.erase(request)
    typer.echo(f"{count} samples erased. Models that were trained on them keep what they learned.")


Ids = Annotated[
    list[str] | None, typer.Option("--id", help="Only samples of this id; may be repeated.")
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", help="Only this label, by number or name; may be repeated."),
]
Sources = Annotated[
    list[str] | None, typer.Option("--source", help="Only this source; may be repeated.")
]
Rules = Annotated[
    list[str] | None, typer.Option("--rule", help="Only what this rule holds; may be repeated.")
]
Since = Annotated[
    datetime | None, typer.Option(help="Stored at this time or later, by the device's clock.")
]
Until = Annotated[datetime | None, typer.Option(help="Stored at this time or earlier.")]


@agent.command("pull")
def pull_samples(
    out: Out,
    id_: Ids = None,
    label: Labels = None,
    source: Sources = None,
    rule: Rules = None,
    since: Since = None,
    until: Until = None,
    namespace: Namespace = None,
    socket: Socket = "fedkeep.sock",
) -> None:
    """Take samples out of a running agent, with names and files as they came.

    Options of one kind add up, those of different kinds must all hold; `--label unlabelled` are
    those that wait for their labels. What is written is readable by its owner only.
    """
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists: choose another name")
    selection = _selection(id_, label, source, since, until, namespace, rule)
    with AgentClient(socket, timeout=60) as client:
        parts = list(client.pull_samples(selection))
    samples = [sample for part in parts for sample in part.samples]
    notes = [
        SampleMetadata(
            one.id,
            score=one.score,
            label=one.label,
            wall=one.stored,
            source=one.source,
            name=one.name,
            time=math.nan if one.time is None else one.time,
            target=one.target,
        )
        for one in samples
    ]
    shape, names = parts[0].shape, parts[0].label_names
    if shape is None:
        write_samples(out, notes, names, payloads=[one.data for one in samples])
    else:
        x = np.frombuffer(b"".join(one.data for one in samples), "<f4").reshape(-1, *shape)
        write_samples(out, notes, names, x=x)
    typer.echo(f"{len(samples)} samples written to {out}")


@agent.command()
def upload(
    id_: Ids = None,
    label: Labels = None,
    source: Sources = None,
    rule: Rules = None,
    since: Since = None,
    until: Until = None,
    namespace: Namespace = None,
    socket: Socket = "fedkeep.sock",
) -> None:
    """Queue stored samples to be sent where [upload] says, if this device consents."""
    selection = _selection(id_, label, source, since, until, namespace, rule)
    if selection == SampleFilter():
        raise ConfigError("say what to send: --id, --label, --source, --rule, --since or --until")
    with AgentClient(socket, timeout=60) as client:
        queued = client.upload(selection)
    typer.echo(
        f"{queued.new} samples queued, {queued.waiting} wait; "
        f"{queued.bytes_left} more bytes may leave within 24 hours"
    )


@agent.command()
def keygen(
    key: Annotated[Path, typer.Argument(metavar="KEY", help="The private key's file to be made.")],
) -> None:
    """Make a pair of keys for settings from afar: KEY, which stays with you, and KEY.pub."""
    private, public = new_keys()
    for path, content in ((key, private), (key.with_name(key.name + ".pub"), public)):
        with open_new(path) as file:
            file.write(content.hex().encode() + b"\n")
    typer.echo(f"{key} stays with you; [remote] key_file of each device is {key}.pub")


@agent.command()
def sign(
    settings: Annotated[Path, typer.Argument(help="A TOML file: `version`, and whole tables.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The signed file to be written.")],
    key: Annotated[Path, typer.Option(help="The private key, as `keygen` made it.")],
) -> None:
    """Sign settings for devices that trust your key."""
    try:
        text = settings.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {settings}: {error}") from error
    version, tables = parsed(text)
    with atomic_write(out) as file:
        file.write(signed(text, read_key(str(key))))
    typer.echo(f"{out} has version {version} of {', '.join(tables) or 'no table'}")


@agent.command()
def configure(
    settings: Annotated[Path, typer.Argument(help="Settings that `sign` has signed.")],
    socket: Socket = "fedkeep.sock",
) -> None:
    """Send signed settings to a running agent, which takes them on trial."""
    try:
        content = settings.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {settings}: {error.strerror}") from error
    with AgentClient(socket, timeout=60) as client:
        typer.echo(client.configure(content))


def _selection(
    ids: list[str] | None,
    labels: list[str] | None,
    sources: list[str] | None,
    since: datetime | None,
    until: datetime | None,
    namespace: str | None,
    rules: list[str] | None,
) -> SampleFilter:
    """Return the conditions of a command's options."""
    if namespace is not None and not ids:
        raise ConfigError("--namespace says which --id is meant: give that, too, or --source")
    first, last = (None if time is None else time.timestamp() for time in (since, until))
    return SampleFilter(
        tuple(ids or ()),
        tuple(labels or ()),
        tuple(sources or ()),
        first,
        last,
        namespace,
        tuple(rules or ()),
    )


def _print(*lines: str) -> None:
    """Print lines as they are: no markup, no wrapping, nothing that a terminal would obey."""
    console = Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
    console.print(*map(printable, lines), sep="\n")


def _privacy(now: Status) -> list[str]:
    """Return what was spent of the privacy budget, where there is an account of it."""
    budget = "no budget is set" if now.epsilon_budget is None else f"of {now.epsilon_budget:g}"
    return (
        []
        if now.epsilon_spent is None
        else [f"privacy  epsilon {now.epsilon_spent:.4g} spent, {budget}"]
    )


def gist(now: GistStatus) -> str:
    """Return what the gist is worth, does and takes, as a sentence."""
    known = f"worth {now.worth:.1f} samples" if now.worth else "nothing known yet"
    percents = {"trust": now.trust, "likeness": now.likeness, "reach": now.reach}
    did = "".join(
        f", {name} {100 * value:.0f} %" for name, value in percents.items() if value is not None
    )
    return f"{now.name}, {known}{did}; {now.arrivals} arrivals to be taken in, {now.bytes} bytes"


def explain(decision: Reason, id_: int, names: Sequence[str] = ()) -> str:
    """One decision as a sentence; `names` are those of the labels."""
    label = label_name(decision.label, names)
    under = f"by {decision.policy} under the model of round {decision.model_version}"
    kind, way, full = "value", "", ""
    if decision.policy == "balanced-reservoir":
        kind, full = (
            "random key",
            f": label {label} had its slots, with higher keys in all of them",
        )
        way = (
            ": the label most above its target gave its lowest key away, "
            "of a sample already trained on first"
        )
    value = "" if decision.score is None else f"{decision.score:.6g}"
    score = f" with {kind} {value}" if value else ""
    floor = "" if decision.floor is None else f" against {decision.floor:.6g}"
    if decision.id != id_ and decision.verdict == "waiting":
        return f"left the waiting room for sample {decision.id}; its label had not come"
    if decision.id != id_:
        return f"replaced by sample {decision.id}{score} {under}{way}"
    sentences = {
        "kept": f"kept{score}: there was room for label {label}, {under}",
        "replaced": (
            f"kept{score}{floor} of sample {decision.displaced}, which it replaced, {under}{way}"
        ),
        "refreshed": f"seen again; value renewed to {value} {under}",
        "refused": f"refused{score}{floor} {under}{full}",
        "erased": "erased on request; nothing else is known of it",
        "expired": "removed when its time to live was over",
        "waiting": "came without a label, and waits for it",
        "unlabelled": "left the waiting room; its label had not come",
        "corrected": (
            f"its label was corrected to {decision.label}{score}, {under}; what its gradient "
            "added to the device's sums under the former label stays"
        ),
    }
    return sentences.get(decision.verdict, f"dropped when the plan or its value changed, {under}")


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
