"""A model's file is run once in a process of its own, which can be ended whatever the file does."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np

from fedkeep.core.errors import ConfigError

LOAD_SECONDS = 60.0
"""How long a model may take to be loaded and to see one sample, where the configuration says
nothing."""
_WORDS = 600
"""Of what the trial said, at most so many letters are repeated."""


def try_model(path: Path, sha256: str | None, shape: tuple[int, ...], seconds: float) -> None:
    """Load an exported model and show it one sample of zeros, in another process.

    An ONNX file can hold loops without end, or ask for more memory than there is: neither may keep
    the agent from starting with a sentence.

    Parameters
    ----------
    path
        The ONNX file.
    sha256
        What its checksum must be; None: it is not checked.
    shape
        A sample's shape.
    seconds
        How long that may take.

    Raises
    ------
    ConfigError
        If it takes longer, or the process dies of it. What else is wrong with the file is for the
        caller to find, who loads it next.
    """
    command = [sys.executable, "-m", __name__, str(path), sha256 or "", str(seconds)]
    command += map(str, shape)
    try:
        done = subprocess.run(
            command,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the model {path} did not value one sample in {seconds:g} seconds: it may loop "
            "without end; export it anew, or set [model] load_seconds if this device is that slow"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the model {path} cannot be tried ({error.strerror}): there is no room for a process"
        ) from error
    if done.returncode < 0:
        raise ConfigError(
            f"the model {path} ends the process that runs it (signal {-done.returncode}): it may "
            "need more memory than there is"
        )
    if done.returncode:
        words = " ".join(done.stderr.decode(errors="replace").split())[-_WORDS:]
        raise ConfigError(words or f"the model {path} cannot be run")


def main(arguments: list[str]) -> int:
    """Try the file in this process; every mistake that a sentence names is left to the agent."""
    from fedkeep.learn.onnx_learner import OnnxLearner

    path, sha256, seconds, *shape = arguments
    # If the agent is killed meanwhile, nobody else would end it.
    resource.setrlimit(resource.RLIMIT_CPU, (2 + int(float(seconds)), -1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        learner = OnnxLearner(Path(path), sha256 or None)
        learner.logits(learner.initial(0), np.zeros((1, *map(int, shape)), np.float32))
    except MemoryError:
        sys.stderr.write(f"the model {path} needs more memory than there is")
        return 1
    except Exception:  # noqa: BLE001 - the agent meets the same, and says what to do about it
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
