"""A training loop as people write it: gradient accumulation, a moving average of the loss, and a log line now and
then."""

import logging
from itertools import count

import torch
from torch import nn

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger("train")
ACCUMULATE = 4


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
        self.average = 0.0

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(inputs), labels) / ACCUMULATE
        self.average = 0.9 * self.average + 0.1 * loss.item()
        if self.average > 1.0:
            logger.info("loss is still %.3f", self.average)
        if torch.isnan(loss):
            raise ArithmeticError("the loss is not a number")
        return loss


torch.manual_seed(0)
trainer = Trainer()
step = torch.compile(trainer, backend="aot_eager")
optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
for number in count(1):
    loss = step(torch.randn(8, 16), torch.randint(0, 4, (8,)))
    loss.backward()
    if number % ACCUMULATE == 0:
        nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d", number // ACCUMULATE)
    if number == 24:
        break
