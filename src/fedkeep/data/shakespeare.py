"""The task shakespeare: the next character, by speaker; text in the public domain.

82 speakers are devices that differ by what they say and how. A sample is the sixteen characters
before, of 36, and its label the next one, so that labels are of very different frequency.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.types import AnyArray, IntArray
from fedkeep.data.cache import Progress, RemoteFile, obtain
from fedkeep.data.federation import Federation, ModelSpec, Ownership

SHAKESPEARE = RemoteFile(
    "shakespeare",
    "shakespeare.npz",
    None,
    "77a4e2ed0e8695e8681e16027fe8ce7c7936972fe0751f29d28636933ea0be03",
    how="make it from tinyshakespeare (github.com/karpathy/char-rnn) as docs/paper-map.md says, or "
    "name a folder that has it in FEDKEEP_DATA",
)


@dataclass(frozen=True)
class Shakespeare:
    """Next character by speaker: 36 labels, in the order of the text unless streams shuffle it."""

    form: Literal["indices", "one-hot"] = "indices"
    """`indices`, (16,), are for the models char-mlp, char-gru and char-transformer, which embed
    them; `one-hot`, (16, 36), suits any dense model and takes 2.3 kB a sample."""
    most: int | None = 2000
    """Training samples of a speaker, from the first; a tenth of it are for testing. None: all."""
    rounds_per_pass: int = 300
    """Rounds in which a speaker's text comes once."""

    def __post_init__(self) -> None:
        check_range(self, "most", least=10)
        check_range(self, "rounds_per_pass", least=1)

    def load(self, seed: int, progress: Progress | None = None) -> Federation:  # noqa: ARG002
        """Read the text.

        Parameters
        ----------
        seed : int
            Not used: devices and split are the data's own.
        progress : callable, optional
            Called while a file is downloaded.

        Returns
        -------
        Federation
            A device for each speaker.
        """
        with np.load(obtain(SHAKESPEARE, progress), allow_pickle=False) as file:
            content = {name: file[name] for name in file.files}
        device, test = content["device"].astype(np.int64), content["test"]
        speakers = len(content["speaker"])
        train, tested = (
            Ownership.from_assignment(np.where(test == part, device, -1), speakers)
            for part in (0, 1)
        )
        if self.most is not None:
            train, tested = first_of_each(train, self.most), first_of_each(tested, self.most // 10)
        used = np.sort(np.concatenate([train.indices, tested.indices]))
        place = np.zeros(len(device), dtype=np.int64)
        place[used] = np.arange(len(used))
        symbols = tuple(content["symbols"].tolist())
        contexts = content["context"][used]
        model = ModelSpec("char-gru") if self.form == "indices" else ModelSpec("mlp")
        return Federation(
            "shakespeare",
            contexts.astype(np.float32)
            if self.form == "indices"
            else one_hot(contexts, len(symbols)),
            content["y"][used].astype(np.int64),
            Ownership(place[train.indices], train.sizes),
            Ownership(place[tested.indices], tested.sizes),
            tuple(named(symbol) for symbol in symbols),
            model,
            tuple(content["speaker"].tolist()),
            self.rounds_per_pass,
        )


def first_of_each(owned: Ownership, most: int) -> Ownership:
    """Keep the first samples of each device.

    Parameters
    ----------
    owned : Ownership
        Samples of each device.
    most : int
        How many to keep.

    Returns
    -------
    Ownership
        No more than `most` of each.

    Examples
    --------
    >>> owned = Ownership.from_assignment(np.array([0, 0, 1, 0]), devices=2)
    >>> first_of_each(owned, 2).indices.tolist()
    [0, 1, 2]
    """
    within: IntArray = np.arange(len(owned.indices)) - owned.offsets[owned.owners]
    return owned.where(within < most)


def one_hot(indices: AnyArray, symbols: int) -> AnyArray:
    """Write each index as a row with a single one.

    Parameters
    ----------
    indices : ndarray of int, shape (n, length)
        Which symbol stands where.
    symbols : int
        How many there are.

    Returns
    -------
    ndarray of float32, shape (n, length, symbols)
        Ones where the symbols stand.

    Examples
    --------
    >>> one_hot(np.array([[2, 0]]), symbols=3).tolist()
    [[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]
    """
    rows: AnyArray = np.zeros((*indices.shape, symbols), dtype=np.float32)
    np.put_along_axis(rows, indices[..., None].astype(np.int64), 1.0, axis=-1)
    return rows


def named(symbol: str) -> str:
    """Name a character for people.

    Parameters
    ----------
    symbol : str
        One character.

    Returns
    -------
    str
        A word where it cannot be seen.

    Examples
    --------
    >>> named("a"), named(" ")
    ('a', 'space')
    """
    return {" ": "space", "\n": "newline"}.get(symbol, symbol)
