"""What tables call the methods and streams of the suites.

Curves and result files keep the names that suites, tasks and hashes were made with. Tables,
figures and pages print these: a method by its registered name (`fedkeep.config.methods`) where it
has one, a stream by what it is.
"""

from collections.abc import Iterator

from fedkeep.config.methods import METHODS as REGISTERED

STREAMS: dict[str, dict[str, str]] = {
    "in time order": {
        "c-mapss-ordered": "engines to failure",
        "uji-indoor-ordered": "WiFi floors",
        "uji-indoor-once": "WiFi floors, each sample once",
        "har-ordered": "activities",
        "westermo-ordered": "industrial network",
        "westermo-once": "industrial network, each sample once",
        "shakespeare-ordered": "next character, by speaker",
    },
    "labels in runs": {
        "embedded-bursts": "demo",
        "st-all-labels-bursts": "synthetic, all labels everywhere",
        "ic-bursts": "Fashion-MNIST",
    },
    "shuffled": {
        "embedded": "demo",
        "st-all-labels": "synthetic, all labels everywhere",
        "st-converging": "synthetic, few labels a device",
        "har-converging": "activities",
        "ic": "Fashion-MNIST",
        "tc": "traffic, generated",
        "tc-real": "traffic, real",
        "audio-mnist": "spoken digits",
        "uji-indoor": "WiFi floors",
        "westermo": "industrial network",
        "shakespeare": "next character",
    },
    "fewer slots than labels": {
        "uji-indoor-5-ordered": "WiFi floors in time order, 5 of 13",
        "har-3-ordered": "activities in time order, 3 of 5",
        "audio-mnist-5": "spoken digits, 5 of 10",
        "embedded-5": "demo, 5 of 10",
        "ic-3": "Fashion-MNIST, 3 of 10",
    },
}
"""Tasks of the arena by what their streams are like, those in time order first."""
_OTHER_TASKS = {
    "embedded-drift": "demo, label shift",
    "har-drift": "activities, label shift",
    "engines": "engines to failure",
    "activities": "activities",
    "demo": "demo",
}
"""Tasks of other suites."""
_PAPERS_TASKS = {
    "st": "ST",
    "har": "HAR",
    "ic": "IC",
    "st-10x": "ST, ten times the rate",
    "har-10x": "HAR, ten times the rate",
    "ic-10x": "IC, ten times the rate",
}
"""Tasks of the suite `paper`, which has them at the paper's scale."""
PAPERS_ODE = "ode-paper"
METHODS = {
    "class-balanced-fifo": "balanced-fifo",
    "draw": "balanced-reservoir",
    "ode-default": "ode",
    "ode-est": PAPERS_ODE,
    "ode-exact": f"{PAPERS_ODE}, exact gradient",
    "ode-simplified": f"{PAPERS_ODE}, last layer",
    "full-data-shared": "full-data, gist-shared",
    "full-data-so-far": "full-data, what came so far",
    "fifo-scaffold": "fifo, SCAFFOLD",
    "fifo-fedvarp": "fifo, FedVARP",
    "fifo-momentum": "fifo, server momentum",
    "fifo-float16": "fifo, samples in float16",
    "fifo-int8": "fifo, samples in int8",
    "fifo-no-room": "fifo, no waiting room",
    "class-balanced-fifo-int8": "balanced-fifo, samples in int8",
    "class-balanced-fifo-float16": "balanced-fifo, samples in float16",
    "draw-float16": "balanced-reservoir, samples in float16",
    "draw-int8": "balanced-reservoir, samples in int8",
    "gist-local-int8": "gist-local, m in int8",
    "gist-local-all-int8": "gist-local, m and samples in int8",
    "gist-local-all-int4": "gist-local, m in int4, samples in int8",
    "gist-local-sketch4-int8": "gist-local, rank 4 and samples in int8",
    "gist-local-sketch4-int4": "gist-local, rank 4 in int4, samples in int8",
    "gist-local-sketch4-int4-float16": "gist-local, rank 4 in int4, samples in float16",
    "gist-local-sketch4-int8-float16": "gist-local, rank 4 in int8, samples in float16",
    "gist-local-sketch": "gist-local, rank auto in int8",
    "gist-shared-sketch": "gist-shared, rank auto in int8",
    "gist-local-fifo": "gist-local over fifo",
    "gist-local-balanced": "gist-local over balanced-fifo",
    "gist-local-ode": "gist-local over ode",
    "gist-shared-fifo": "gist-shared over fifo",
    "gist-shared-balanced": "gist-shared over balanced-fifo",
    "gist-shared-ode": "gist-shared over ode",
    "gist-local-no-room": "gist-local, no waiting room",
    **{
        f"rule-{rule}": f"gist-local, rule {rule}"
        for rule in (
            "random",
            "balanced",
            "uncertain",
            "balanced-uncertain",
            "newest",
            "oldest",
        )
    },
    "pseudo-80": "gist-local, pseudo-labels from 0.8",
    "pseudo-95": "gist-local, pseudo-labels from 0.95",
}
"""The methods of `methods/arena.toml` and `methods/labels.toml` that have another name there."""
NOTE = (
    f"`{PAPERS_ODE}` in these tables has the paper's values, estimator and weights with the "
    "coordination and limits of the default, as these curves were made; Table 2 has the paper's "
    "own."
)


def method_name(name: str) -> str:
    """What a method of the suites is called in tables.

    Examples
    --------
    >>> method_name("draw"), method_name("gist-shared")
    ('balanced-reservoir', 'gist-shared')
    """
    return METHODS.get(name, name)


def stream_name(task: str) -> str:
    """What the stream of a task is called in tables, with how it comes.

    Examples
    --------
    >>> stream_name("har-ordered"), stream_name("embedded-5"), stream_name("a-new-task")
    ('activities, in time order', 'demo, 5 of 10', 'a-new-task')
    """
    for group, titles in STREAMS.items():
        if task in titles:
            own = group != "fewer slots than labels"
            return f"{titles[task]}, {group}" if own else titles[task]
    return _OTHER_TASKS.get(task, task)


def papers_task(task: str) -> str:
    """What a task of the suite `paper` is called in tables."""
    return _PAPERS_TASKS.get(task, task)


def is_named(method: str) -> bool:
    """Whether a method of a suite is registered, or has a name in tables."""
    return method in METHODS or method in REGISTERED


def named_tasks() -> Iterator[tuple[str, str]]:
    """List every task of the suites with what it is called in tables."""
    for task in (*(task for group in STREAMS.values() for task in group), *_OTHER_TASKS):
        yield task, stream_name(task)
