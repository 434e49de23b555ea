"""One participation of a device, from the order to the report (steps 5 and 6).

The simulator, the agent and Flower run this class and nothing else. `prepare` is three steps, so
that a simulator can measure what is stored on many devices in one call between them:

1. `begin` applies the order's plan and reads the store;
2. `correct` takes what is stored, as measured under the old model and the new, and computes the
   gist's correction;
3. `look_ahead` takes what is stored, as measured one local step ahead, averages the correction over
   the local steps, and sets the new model: from here on arrivals are measured under it.
"""

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedkeep.core.gist import Correction, Gist, StoredGradients
from fedkeep.core.protocols import GradientProbe, PerSampleGradients, Stored, TrainingJob
from fedkeep.core.seeds import child_seed
from fedkeep.core.types import Report, TrainOrder, Vector

if TYPE_CHECKING:
    from fedkeep.core.device import Device

_FIRST_NUMBERS = 4096
"""Parameters that are compared first: where two models differ, these most often show it."""


class Participation:
    """The protocol of one participation.

    A device may go on taking in arrivals between `prepare` and `finish`, as an agent does while it
    trains: they are measured under the order's model, and have not been trained on.

    Parameters
    ----------
    device : Device
        The device that takes part.
    order : TrainOrder
        What the server asks of it; `Device.screen` tells whether it fits the device.

    Examples
    --------
    >>> from fedkeep.core.device import Device
    >>> from fedkeep.core.policies.fifo import Fifo
    >>> from fedkeep.core.types import Batch, LocalTraining
    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> learner = DenseLearner((2, 2))
    >>> device = Device(learner, Fifo(), capacity=2, sample_shape=(2,), labels=2)
    >>> x = np.eye(2, dtype=np.float32)
    >>> _ = device.observe(Batch(x, np.array([0, 1]), np.array([4, 5])), time=0.0)
    >>> order = TrainOrder(0, learner.initial(1), None, LocalTraining(0.1, epochs=3))
    >>> participation = Participation(device, order)
    >>> participation.prepare().batch.ids.tolist()
    [4, 5]
    >>> report = participation.finish(participation.train())
    >>> report.samples, report.steps
    (2, 3)
    """

    job: TrainingJob
    """What to train on; known once `begin` has run."""

    def __init__(self, device: "Device", order: TrainOrder) -> None:
        self.device, self.order = device, order
        self.correction: Correction | None = None
        """What the gist corrects; None without one."""
        scored = device.policy.uses_global_gradient
        self._global_gradient = order.global_gradient if scored else None
        """What the device keeps of it: the fleet's gist is of use in this participation only."""
        self._first_gradient = device.global_gradient is None and self._global_gradient is not None
        self._stored: Stored
        self._probe: GradientProbe
        self._gradients: StoredGradients | None = None
        self._after: PerSampleGradients | None = None

    @property
    def gradients(self) -> StoredGradients | None:
        """What is stored, as measured under the old model and the new; None without a gist."""
        return self._gradients

    def prepare(self) -> TrainingJob:
        """Follow the order up to the training itself.

        Returns
        -------
        TrainingJob
            What to train on, and what corrects each step.
        """
        self.begin()
        self.correct()
        self.look_ahead()
        return self.job

    def begin(self) -> None:
        """Apply the order's plan and read the store (step 1 of `prepare`)."""
        device, order = self.device, self.order
        device.sender.settle(order.accepted_round)
        if order.assignment is not None:
            device.apply_plan(order.assignment)
        self._stored = device.store.stored()
        weights = device.sample_weights(self._stored.regions, self._stored.batch.ids)
        seed = child_seed(device.seed, "train", order.round)
        self.job = TrainingJob(self._stored.batch, weights, seed)

    def correct(
        self,
        before: PerSampleGradients | None = None,
        after: PerSampleGradients | None = None,
        probe: GradientProbe | None = None,
    ) -> None:
        """Compute the gist's correction, and close the sum of arrivals (step 2 of `prepare`).

        Parameters
        ----------
        before, after : PerSampleGradients, optional
            What is stored, as measured under the model that the device has and under the order's;
            measured here if not given.
        probe : GradientProbe, optional
            What measures under the order's model: one serves all participants of a simulation,
            where a copy of the model for each would fill the memory.
        """
        device, order, batch = self.device, self.order, self.job.batch
        self._probe = device.learner.probe(order.model) if probe is None else probe
        self._after = after
        device.sender.prepare(order, self._probe, batch, device.window)
        if device.gist is not None and device.probe is not None:
            self._correct_by(device.gist, device.probe, before)
        if device.window.size:
            device.window.clear()

    def _correct_by(
        self, gist: Gist, old_model: GradientProbe, before: PerSampleGradients | None
    ) -> None:
        """Compute the correction; there is none where the stored samples weigh nothing."""
        device, batch = self.device, self.job.batch
        total = float(self.job.weights.sum())
        if total <= 0:
            return
        if before is None:
            before = old_model.measure(batch)
        if self._after is None:
            self._after = self._probe.measure(batch)
        self._gradients = StoredGradients(
            self.job.weights / total,
            self._stored.regions,
            self._stored.uses == 0,
            before,
            self._after,
        )
        correction = gist.correct(
            self._gradients,
            device.window,
            device.label_shares(),
            device.exchange.fleet_gradient(self.order),
            self._models(),
        )
        self._add(correction)

    @cached_property
    def next_model(self) -> Vector | None:
        """The model after one local step; None without a correction or a second step."""
        correction = self.job.correction
        if self._gradients is None or correction is None or self.steps < 2:
            return None
        step = self._gradients.means[1] + correction
        step *= np.float32(self.order.local.learning_rate)
        model = self.order.model
        if len(step) == len(model):
            np.subtract(model, step, out=step)
            return step
        model = model.copy()
        model[len(model) - len(step) :] -= step
        return model

    def look_ahead(self, ahead: PerSampleGradients | None = None) -> None:
        """Average the correction over the steps, and set the new model (step 3 of `prepare`).

        Parameters
        ----------
        ahead : PerSampleGradients, optional
            What is stored, as measured under `next_model`; measured here if not given.
        """
        device, model = self.device, self.next_model
        if model is not None and self._gradients is not None and self.correction is not None:
            if ahead is None:
                ahead = device.learner.probe(model).measure(self.job.batch)
            phi = self._gradients.noise_regression(ahead)
            self._add(self.correction.step_average(phi, self.steps))
        device.set_model(self.order.model, self._global_gradient, self._probe)
        if device.gist is not None:
            device.gist.keep(self.correction)

    @property
    def steps(self) -> int:
        """The local steps to come."""
        samples, local = len(self.job.batch), self.order.local
        if not local.batch_size:
            return local.epochs * min(samples, 1)
        return local.epochs * -(-samples // local.batch_size)

    def train(self) -> Vector:
        """Train on the job; gives the order's model where nothing is stored."""
        if not len(self.job.batch):
            return self.order.model
        return self.device.learner.train(self.order.model, self.job, self.order.local)

    def finish(self, model: Vector) -> Report:
        """Note that the samples were used, score what is stored anew, and report.

        Parameters
        ----------
        model : Vector
            The trained model; the order's own counts where there was nothing to train on.

        Returns
        -------
        Report
            What goes back to the server, before privacy.
        """
        device, order, job = self.device, self.order, self.job
        if order.round != device.round:
            device.store.mark_used(job.batch.ids)
        device.round = order.round
        device.selection.frequencies.decay()
        if device.options.rescore or self._first_gradient:
            self._rescore()
        device.expire()
        device.selection.divide()
        device.pseudo_label()
        gradient, count = device.sender.message(device.gist)
        return Report(
            round=order.round,
            model=model if len(job.batch) else order.model,
            weight=float(job.weights.sum()),
            steps=self.steps,
            samples=len(job.batch),
            local_gradient=gradient,
            gradient_samples=count,
        )

    def _rescore(self) -> None:
        """Score what is stored now; measurements made before training serve if it is the same."""
        held = self.device.store.stored()
        same = held.batch is self._stored.batch
        self.device.rescore(held, self._after if same else None)

    def _add(self, correction: Correction) -> None:
        """Let the correction be added to each local step; it may cover the last layers alone."""
        vector, size = correction.vector, self.device.learner.gradient_size
        if vector is not None and len(vector) < size:
            vector = np.pad(vector, (size - len(vector), 0))
        self.correction = correction
        self.job = replace(self.job, correction=vector)

    def _models(self) -> tuple[Vector, Vector] | None:
        """Give the device's model and the order's; None if they are the same."""
        mine, sent = self.device.model, self.order.model
        if mine is None:
            return None
        same = np.array_equal(mine[:_FIRST_NUMBERS], sent[:_FIRST_NUMBERS])
        return None if same and np.array_equal(mine, sent) else (mine, sent)
