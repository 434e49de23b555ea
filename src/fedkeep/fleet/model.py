"""The learner that a table `model` names."""

from pathlib import Path

from fedkeep.config import Table
from fedkeep.core.errors import ConfigError
from fedkeep.core.ports import Learner
from fedkeep.learn.models import learner_for


def learner_of(model: Table, shape: tuple[int, ...], labels: int) -> Learner:
    """The model of `[model]`: an exported file by `path`, else one of ours or a torch factory by `name`.

    On real devices the last layer alone is valued unless `last_layers` says otherwise; 0 is all of them.

    >>> learner_of({"name": "softmax"}, shape=(30,), labels=10).size
    310
    """
    options = dict(model)
    path = options.pop("path", None)
    name = str(options.pop("name", "softmax"))
    if path is None:
        last_layers = options.pop("last_layers", 1)
        return learner_for(name, shape, labels, last_layers=last_layers or None, options=options)
    if options:
        raise ConfigError(f"a model from a file has no option '{min(options)}': remove it from [model]")
    from fedkeep.learn.onnx_learner import OnnxLearner

    return OnnxLearner(Path(str(path)))
