"""What the outer half must reduce to (ALGORITHMS.md, acceptance tests 1 to 3), in float64.

A linear model whose gradients are exact, real weights from weighing.py, a codec that loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.volunteer.training.synthetic import gradient, work
from volunteer.run import OuterSpec
from volunteer.training.outer import outer_step
from volunteer.training.pseudo_gradient import contribute, rebase
from volunteer.training.weighing import Measured, weigh

P, BATCH = 13, 4
PLAIN = OuterSpec(lr=1.0, momentum=0.0)
MakeOptimizer = Callable[[Tensor], torch.optim.Optimizer]


class LosslessCodec:
    error_feedback_beta = 1.0

    def encode(self, x_P: Tensor) -> Tensor:
        return x_P.clone()

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded

    def subtract_decoded(self, encoded: Tensor, x_P: Tensor) -> None:
        x_P -= self.decode(encoded)


def adamw(theta_P: Tensor) -> torch.optim.Optimizer:
    return torch.optim.AdamW([theta_P], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


def sgd(theta_P: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([theta_P], lr=0.05)


def batch(label: str) -> tuple[Tensor, Tensor]:
    inputs = gradient(f"x-{label}", BATCH * P, scale=1.0).double().view(BATCH, P)
    return inputs, gradient(f"y-{label}", BATCH, scale=1.0).double()


def set_gradient(theta_P: Tensor, labels: list[str]) -> None:
    """Gradient of the mean squared error over the labelled batches together."""
    inputs = torch.cat([batch(label)[0] for label in labels])
    targets = torch.cat([batch(label)[1] for label in labels])
    theta_P.grad = 2 * inputs.T @ (inputs @ theta_P.detach() - targets) / len(targets)


class Worker:
    def __init__(self, start_P: Tensor, make_optimizer: MakeOptimizer) -> None:
        self.theta_P = start_P.clone().requires_grad_()
        self.base_P = start_P.clone()
        self.residual_P = torch.zeros_like(start_P)
        self.optimizer = make_optimizer(self.theta_P)

    def step(self, *labels: str) -> None:
        set_gradient(self.theta_P, list(labels))
        self.optimizer.step()

    def contribute(self) -> Tensor:
        theta_P = self.theta_P.detach()
        result = contribute(theta_P, self.base_P, self.residual_P, LosslessCodec())
        self.base_P, self.residual_P = theta_P.clone(), result.residual_P
        return result.quantised_P

    def stand_on(self, weights_P: Tensor) -> None:
        theta_P, self.base_P = rebase(self.theta_P.detach(), self.base_P, weights_P)
        with torch.no_grad():
            self.theta_P.copy_(theta_P)


def committed(weights_P: Tensor, quantised: list[Tensor]) -> Tensor:
    """Apply one commit of equal contributions with the plain outer step.

    They count as aligned: four samples each in 13 dimensions disagree near the optimum, as members
    of a real swarm do not, and the cosine rule is not what is looked at here.
    """
    num = len(quantised)
    aligned = Measured(norms=[1.0] * num, gram=[[1.0] * num] * num, num_elements=num)
    outcomes = weigh([work(index) for index in range(num)], aligned)
    aggregate_P = torch.zeros_like(weights_P)
    for outcome, q_P in zip(outcomes, quantised, strict=True):
        aggregate_P = aggregate_P + outcome.weight * outcome.clip_scale * q_P
    return outer_step(weights_P, torch.zeros_like(weights_P), aggregate_P, PLAIN)[0]


START_P = gradient("start", P, scale=1.0).double()


def test_one_worker_with_the_plain_outer_step_is_uninterrupted_adamw() -> None:
    plain, member, weights_P = Worker(START_P, adamw), Worker(START_P, adamw), START_P
    for round_index in range(8):
        for step_index in range(5):
            plain.step(f"{round_index}-{step_index}")
            member.step(f"{round_index}-{step_index}")
        weights_P = committed(weights_P, [member.contribute()])
        plain.step(f"{round_index}-overlap")
        member.step(f"{round_index}-overlap")  # trained while the exchange was in flight
        member.stand_on(weights_P)
        assert float((member.theta_P - plain.theta_P).detach().abs().max()) < 1e-12
    assert float((plain.theta_P.detach() - START_P).abs().max()) > 0.1


def test_three_workers_on_the_same_data_are_one() -> None:
    plain, weights_P = Worker(START_P, adamw), START_P
    members = [Worker(START_P, adamw) for _ in range(3)]
    for round_index in range(8):
        for step_index in range(5):
            for worker in (plain, *members):
                worker.step(f"{round_index}-{step_index}")
        weights_P = committed(weights_P, [member.contribute() for member in members])
        for member in members:
            member.stand_on(weights_P)
            assert float((member.theta_P - plain.theta_P).detach().abs().max()) < 1e-12


def test_four_workers_with_one_sgd_step_are_one_with_four_times_the_batch() -> None:
    plain, weights_P = Worker(START_P, sgd), START_P
    members = [Worker(START_P, sgd) for _ in range(4)]
    for round_index in range(30):
        labels = [f"{round_index}-{number}" for number in range(4)]
        plain.step(*labels)
        for member, label in zip(members, labels, strict=True):
            member.step(label)
        quantised = [member.contribute() for member in members]
        weights_P = committed(weights_P, quantised)
        for member in members:
            member.stand_on(weights_P)
        assert float((weights_P - plain.theta_P.detach()).abs().max()) < 1e-12
