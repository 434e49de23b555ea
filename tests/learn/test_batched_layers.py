"""Chains of layers and fast pooling against torch itself."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.func import functional_call, grad, vmap  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from fedkeep.learn.batched_layers import FastPool, Pass, chain_of, replaced, tiling  # noqa: E402
from fedkeep.learn.objective import output_error  # noqa: E402
from fedkeep.learn.torch_models import lenet, traffic_cnn  # noqa: E402
from tests.golden.modules import har_dnn, logistic  # noqa: E402

C, N = 3, 4


def strided_pictures() -> nn.Module:
    """Strides, padding and dilation that differ between the axes, and windows that leave a rest."""
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.ReLU(),
        nn.MaxPool2d((2, 3)),
        nn.Conv2d(3, 4, 2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def strided_sequences() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, stride=2, padding=2, dilation=2),
        nn.MaxPool1d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6, 4),
        nn.ReLU(),
        nn.Linear(4, 3),
    )


CHAINS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lenet, (1, 28, 28)),
    (traffic_cnn, (3, 64)),
    (har_dnn, (900,)),
    (logistic, (60,)),
    (strided_pictures, (2, 12, 11)),
    (strided_sequences, (2, 13)),
]


def by_autograd(
    module: nn.Module, parameters: list[Tensor], x: Tensor, y: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Logits and gradients of the summed loss of one model, by torch."""
    named = dict(zip(dict(module.named_parameters()), parameters, strict=True))
    leaves = {name: value.clone().requires_grad_() for name, value in named.items()}
    logits = functional_call(module, leaves, (x,))
    return logits, list(
        torch.autograd.grad(cross_entropy(logits, y, reduction="sum"), list(leaves.values()))
    )


@pytest.mark.parametrize("flat", [False, True], ids=["noise", "flat"])
@pytest.mark.parametrize(("factory", "shape"), CHAINS)
def test_a_chain_does_what_autograd_does(
    factory: Callable[[], nn.Module], shape: tuple[int, ...], flat: bool
) -> None:
    """Also on constant inputs, where all places of a window are equal and the first must count."""
    torch.manual_seed(0)
    modules = [factory() for _ in range(C)]
    parameters = [
        torch.stack(list(each)).detach()
        for each in zip(*(m.parameters() for m in modules), strict=True)
    ]
    x = (
        torch.ones(C, N, *shape) * torch.rand(C, N, *[1] * len(shape))
        if flat
        else torch.randn(C, N, *shape)
    )
    y = torch.randint(0, 3, (C, N))
    chain = chain_of(modules[0])
    assert chain is not None
    passed = Pass(chain, parameters, x)
    gradients = passed.gradients(output_error(passed.logits, y))
    for c, module in enumerate(modules):
        logits, expected = by_autograd(module, [p[c] for p in parameters], x[c], y[c])
        torch.testing.assert_close(passed.logits[c].mT, logits)
        for mine, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine[c], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5),
        nn.Linear(4, 4, bias=False),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.MaxPool2d(3, stride=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Flatten(0),
        nn.Tanh(),
    ],
    ids=repr,
)
def test_a_module_with_any_other_layer_is_no_chain(layer: nn.Module) -> None:
    assert chain_of(nn.Sequential(nn.Linear(4, 4), layer)) is None


def test_a_layer_used_twice_makes_no_chain() -> None:
    layer = nn.Linear(4, 4)
    assert chain_of(nn.Sequential(layer, nn.ReLU(), layer)) is None


@pytest.mark.parametrize("flat", [False, True], ids=["noise", "flat"])
@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.MaxPool2d(2), (3, 2, 11, 7)),
        (nn.MaxPool2d((3, 2)), (3, 2, 9, 4)),
        (nn.MaxPool1d(2), (3, 2, 8)),
        (nn.MaxPool1d(3), (3, 2, 11)),
    ],
    ids=repr,
)
def test_fast_pooling_is_pooling(pool: nn.Module, shape: tuple[int, ...], flat: bool) -> None:
    """Forward, backward, second derivative and vmap; also with all places of a window equal."""
    torch.manual_seed(0)
    x = torch.ones(shape) if flat else torch.randn(shape)
    fast = replaced(nn.Sequential(nn.Sequential(pool)), tiling, FastPool)
    assert any(isinstance(part, FastPool) for part in fast.modules())
    assert torch.equal(fast(x), pool(x))
    mapped = [vmap(grad(lambda each, by=by: by(each[None]).pow(3).sum()))(x) for by in (fast, pool)]
    assert torch.equal(*mapped)
    x.requires_grad_()
    once = [torch.autograd.grad(by(x).pow(3).sum(), x, create_graph=True)[0] for by in (fast, pool)]
    assert torch.equal(*once)
    twice = [torch.autograd.grad(first.square().sum(), x)[0] for first in once]
    torch.testing.assert_close(*twice)
