"""`fedkeep export`: a torch model as a file that a device without torch can run."""

from pathlib import Path
from typing import Annotated

import typer

from fedkeep.core.errors import ConfigError


def export(
    model: Annotated[
        str, typer.Argument(help="module:factory, or the name of a model that comes with fedkeep.")
    ],
    out: Annotated[Path, typer.Option(help="The ONNX file to write.")],
    weights: Annotated[Path | None, typer.Option(help="The weights, as safetensors.")] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="The shape of one sample, e.g. 3,64; not needed if the first layer is linear."
        ),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(help="cross-entropy, of classes; squared or huber, of numbers to predict."),
    ] = "cross-entropy",
    delta: Annotated[
        float | None, typer.Option(help="Where the Huber loss becomes linear; 1 if left out.")
    ] = None,
    centre: Annotated[
        float | None, typer.Option(help="The number that an output of 0 stands for.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="What an output is measured in; 1 if left out.")
    ] = None,
) -> None:
    """Write a torch model as a file for devices without torch.

    ONNX with the outputs that valuation needs; checked to agree with torch.
    """
    from fedkeep.core.targets import NumberTargets
    from fedkeep.learn.export import TOLERANCE
    from fedkeep.learn.export import export as write
    from fedkeep.learn.losses import loss_of
    from fedkeep.learn.models import torch_factory

    sides = tuple(int(side) for side in shape.split(",") if side.isdigit()) if shape else None
    if shape and (sides is None or 0 in sides or len(sides) != len(shape.split(","))):
        raise ConfigError(
            f"--shape takes whole numbers above 0 with commas between them, got '{shape}'"
        )
    given = {"loss": loss, "delta": delta, "centre": centre, "scale": scale}
    options = {key: value for key, value in given.items() if value is not None}
    chosen = loss_of(options, None if loss == "cross-entropy" else NumberTargets())
    if isinstance(chosen, str):
        raise ConfigError("--loss takes cross-entropy, squared or huber, none of your own")
    difference = write(torch_factory(model), sides, weights, out, chosen)
    typer.echo(f"{out}: agrees with torch to {difference:.2g} (at most {TOLERANCE:g} is allowed)")
