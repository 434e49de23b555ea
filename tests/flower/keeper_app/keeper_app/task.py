"""The model, the stream, and how each strategy and mod of Flower's is made."""

from collections.abc import Callable
from typing import Any

import flwr.serverapp.strategy as strategies
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import mod as mods
from flwr.serverapp.strategy import FedAvg, Strategy

FEATURES, LABELS = 4, 3
ROUNDING = 0.01
TREES = (
    b'{"learner": {"gradient_booster": {"model": {"gbtree_model_param": {"num_trees": "1", '
    b'"num_parallel_tree": "1"}, "iteration_indptr": [0, 1], "trees": [{"id": 0}], '
    b'"tree_info": [0]}}}}'
)
"""Boosted trees as xgboost writes them."""


def net() -> torch.nn.Module:
    """Make the model, the same everywhere."""
    torch.manual_seed(0)
    return torch.nn.Linear(FEATURES, LABELS)


def arrivals(node: int, round_: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw what arrives at a node between two messages."""
    draw = np.random.default_rng([node, round_])
    y = draw.integers(LABELS, size=24)
    return (np.eye(FEATURES)[y] * 3 + draw.normal(size=(24, FEATURES))).astype(np.float32), y


def strategy_of(name: str, nodes: int) -> Strategy:
    """Make the strategy of that name, with what it asks for beyond nothing."""
    made: dict[str, Callable[[], Strategy]] = {
        "Bulyan": lambda: strategies.Bulyan(num_malicious_nodes=0),
        "Krum": lambda: strategies.Krum(num_malicious_nodes=1),
        "MultiKrum": lambda: strategies.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=4),
        "QFedAvg": lambda: strategies.QFedAvg(
            client_learning_rate=0.3, train_loss_key="train-loss"
        ),
        "FedXgbBagging": lambda: strategies.FedXgbBagging(fraction_evaluate=0.0),
        "FedXgbCyclic": lambda: strategies.FedXgbCyclic(fraction_evaluate=0.0),
        "DifferentialPrivacyServerSideFixedClipping": lambda: (
            strategies.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.01, 5.0, nodes)
        ),
        "DifferentialPrivacyServerSideAdaptiveClipping": lambda: (
            strategies.DifferentialPrivacyServerSideAdaptiveClipping(
                FedAvg(), 0.01, nodes, clipped_count_stddev=0.1
            )
        ),
        "DifferentialPrivacyClientSideFixedClipping": lambda: (
            strategies.DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.01, 5.0, nodes)
        ),
        "DifferentialPrivacyClientSideAdaptiveClipping": lambda: (
            strategies.DifferentialPrivacyClientSideAdaptiveClipping(
                FedAvg(), 0.01, nodes, clipped_count_stddev=0.1
            )
        ),
    }
    make: Callable[[], Strategy] = made.get(name, getattr(strategies, name))
    return make()


def compression(msg: Message, context: Context, call_next: Any) -> Message:
    """Halve what is sent, as a mod of one's own: float16, and back to the model's dtype."""
    reply: Message = call_next(msg, context)
    (name,) = reply.content.array_records
    halved = {
        key: Array(array.numpy().astype(np.float16).astype(array.dtype))
        for key, array in reply.content.array_records[name].items()
    }
    reply.content[name] = ArrayRecord(halved)
    return reply


MODS: dict[str, Any] = {
    "LocalDpMod": mods.LocalDpMod(5.0, 0.001, 10.0, 1e-5),
    "fixedclipping_mod": mods.fixedclipping_mod,
    "adaptiveclipping_mod": mods.adaptiveclipping_mod,
    "arrays_size_mod": mods.arrays_size_mod,
    "message_size_mod": mods.message_size_mod,
    "compression": compression,
}
