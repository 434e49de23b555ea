"""Networks as torch modules: the paper's convolutional ones, and three for text."""

import torch
from torch import Tensor, nn
from torch.nn import functional


def lenet(classes: int = 10) -> nn.Module:
    """Make the authors' LeNet for (n, 1, 28, 28) pictures.

    There is no activation between its dense layers.

    Parameters
    ----------
    classes : int
        Labels.

    Returns
    -------
    nn.Module
        25,000 parameters.
    """
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 84), nn.Linear(84, classes),
    )  # fmt: skip


def traffic_cnn(classes: int = 20) -> nn.Module:
    """Make the CNN for (n, 3, 64) sequences: size, direction and gap of 64 packets.

    Parameters
    ----------
    classes : int
        Labels.

    Returns
    -------
    nn.Module
        Four convolutions and two dense layers.
    """
    return nn.Sequential(
        nn.Conv1d(3, 32, 3, padding=1), nn.ReLU(),
        nn.Conv1d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Conv1d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip


class CharMlp(nn.Module):
    """A dense net over embedded characters.

    Parameters
    ----------
    classes : int
        Labels, which are the characters.
    length : int
        Characters of a context.
    embedding, width : int
        Numbers for a character, and of the hidden layer.
    """

    def __init__(self, classes: int, length: int, embedding: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, embedding)
        self.hidden = nn.Linear(length * embedding, width)
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits, (n, classes), of contexts (n, length) of indices.

        Parameters
        ----------
        x : Tensor
            Indices, as floats.

        Returns
        -------
        Tensor
            Logits.
        """
        logits: Tensor = self.last(functional.relu(self.hidden(self.embed(x.long()).flatten(1))))
        return logits


class CharGru(nn.Module):
    """A gated recurrent unit over embedded characters, in steps that vectorise over samples.

    Parameters
    ----------
    classes : int
        Labels, which are the characters.
    embedding, width : int
        Numbers for a character, and of the state.

    References
    ----------
    Cho et al., Learning phrase representations using RNN encoder-decoder, EMNLP 2014.
    """

    def __init__(self, classes: int, embedding: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(classes, embedding)
        self.inner = nn.Linear(embedding, 3 * width)
        self.outer = nn.Linear(width, 3 * width)
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits, (n, classes), of contexts (n, length) of indices.

        Parameters
        ----------
        x : Tensor
            Indices, as floats.

        Returns
        -------
        Tensor
            Logits, from the last state.
        """
        inputs = self.inner(self.embed(x.long()))
        state = torch.zeros_like(inputs[:, 0, : self.width])
        for step in range(x.shape[1]):
            reset, update, new = inputs[:, step].chunk(3, dim=-1)
            reset_state, update_state, new_state = self.outer(state).chunk(3, dim=-1)
            kept = torch.sigmoid(update + update_state)
            candidate = torch.tanh(new + torch.sigmoid(reset + reset_state) * new_state)
            state = kept * state + (1 - kept) * candidate
        logits: Tensor = self.last(state)
        return logits


class CharTransformer(nn.Module):
    """One block of causal self-attention over embedded characters, normalised before each part.

    Parameters
    ----------
    classes : int
        Labels, which are the characters.
    length : int
        Characters of a context.
    width, heads : int
        Numbers for a character, and how many heads look at them.

    References
    ----------
    Vaswani et al., Attention is all you need, NeurIPS 2017.
    """

    def __init__(self, classes: int, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.place = nn.Embedding(classes, width), nn.Embedding(length, width)
        self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.before_last, self.last = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits, (n, classes), of contexts (n, length) of indices.

        Parameters
        ----------
        x : Tensor
            Indices, as floats.

        Returns
        -------
        Tensor
            Logits, from the last place.
        """
        n, length = x.shape
        found: Tensor = self.embed(x.long()) + self.place.weight[:length]
        parts = self.attend(self.before_attention(found)).chunk(3, dim=-1)
        query, key, value = (
            part.reshape(n, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        seen = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1) @ value
        found = found + self.join(seen.transpose(1, 2).reshape(n, length, -1))
        dense = functional.relu(self.widen(self.before_dense(found)))
        found = found + self.narrow(dense)
        logits: Tensor = self.last(self.before_last(found[:, -1]))
        return logits


def char_mlp(classes: int = 36, length: int = 16, embedding: int = 8, width: int = 64) -> nn.Module:
    """Make a dense net for (n, length) contexts of characters, as indices.

    Parameters
    ----------
    classes : int
        Characters.
    length : int
        Of a context.
    embedding, width : int
        Numbers for a character, and of the hidden layer.

    Returns
    -------
    nn.Module
        11,000 parameters.
    """
    return CharMlp(classes, length, embedding, width)


def char_gru(classes: int = 36, embedding: int = 8, width: int = 64) -> nn.Module:
    """Make a recurrent net for (n, length) contexts of characters, as indices.

    Parameters
    ----------
    classes : int
        Characters.
    embedding, width : int
        Numbers for a character, and of the state.

    Returns
    -------
    nn.Module
        17,000 parameters.
    """
    return CharGru(classes, embedding, width)


def char_transformer(
    classes: int = 36, length: int = 16, width: int = 32, heads: int = 4
) -> nn.Module:
    """Make a small transformer for (n, length) contexts of characters, as indices.

    Parameters
    ----------
    classes : int
        Characters.
    length : int
        Of a context.
    width, heads : int
        Numbers for a character, and how many heads look at them.

    Returns
    -------
    nn.Module
        11,000 parameters.
    """
    return CharTransformer(classes, length, width, heads)
