"""Classifier alignment (SLCA: Zhang et al., 2023): the head is trained on Gaussian samples of all classes alike.

Each task trained its own nodes against its own classes alone; samples of every class bring the nodes of all tasks to
one scale, and no image is needed for it.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from passlora.method.classifiers import Head
from passlora.method.memory import Memory

# As SLCA's authors have it.
SAMPLES = 256  # of each node, an epoch
EPOCHS = 5
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 5e-4
LOGIT_NORM = 0.1
BATCH = 128


def align(head: Head, memory: Memory, tasks: int, generator: torch.Generator) -> None:
    """Cross entropy of z ~ N(mu, Sigma), nodes drawn uniformly, with logits of one length."""
    optimizer = torch.optim.SGD(head.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    steps = math.ceil(EPOCHS * SAMPLES * len(memory.means) / BATCH)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        draw = memory.draw(BATCH, generator, with_noise=True)
        assert draw.noise is not None
        logits = head(draw.means + draw.noise)
        # Their mean length over the tasks' parts, were the parts equally long.
        length = torch.linalg.vector_norm(logits, dim=1, keepdim=True) / math.sqrt(tasks) + 1e-7
        loss = F.cross_entropy(logits / length / LOGIT_NORM, draw.nodes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
