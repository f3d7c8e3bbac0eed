"""LightningModules with manual optimization as users write them; see the tests `test_elastic_lightning_manual*.py`.

Noise is computed from the samples, so that it does not follow the number of workers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.nn import functional

Reach = Callable[[str], None]


def _nowhere(_: str) -> None: ...


class Manual(LightningModule):
    """What all have in common.

    Attributes:
        reach: called where a fault may strike.
        saw: called with the numbers of the samples of a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.reach: Reach = _nowhere
        self.saw: Callable[[list[int]], None] = lambda _: None

    def samples(self, batch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets, *numbers = batch
        self.saw(numbers[0].tolist() if numbers else [])
        dtype = next(self.parameters()).dtype
        return inputs.to(dtype), targets.to(dtype)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, *_ = batch
        value = next(self.parameters()).sum() * inputs.abs().mean()
        self.log("val_loss", value, sync_dist=True, on_epoch=True)


class Gan(Manual):
    """Two optimizers that take turns, each with the other's parameters toggled off; returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LeakyReLU(), torch.nn.Linear(8, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)  # type: ignore[no-any-return]

    def adversarial_loss(self, scores: torch.Tensor, is_real: float) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, is_real))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, _ = self.samples(batch)
        optimizers: Any = self.optimizers()
        optimizer_g, optimizer_d = optimizers
        noise = inputs[:, :3].cos()

        self.toggle_optimizer(optimizer_g)
        self.reach("forward")
        self.generated = self(noise)
        g_loss = self.adversarial_loss(self.discriminator(self.generated), 1.0)
        self.log("g_loss", g_loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.reach("between")

        self.toggle_optimizer(optimizer_d)
        real = self.adversarial_loss(self.discriminator(inputs), 1.0)
        fake = self.adversarial_loss(self.discriminator(self(noise).detach()), 0.0)
        d_loss = (real + fake) / 2
        self.manual_backward(d_loss)
        self.reach("backward")
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)
        self.reach("stepped")
        self.log("d_loss", d_loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.999))
        optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
        return [optimizer_g, optimizer_d], []


class Accumulating(Manual):
    """Gradients of several batches, left over the end of an epoch too; clipped, and with rates stepped by hand."""

    every = 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = self.samples(batch)
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        self.reach("forward")
        loss = functional.mse_loss(self.layers(inputs), targets)
        self.manual_backward(loss / self.every)
        self.reach("backward")
        if (batch_idx + 1) % self.every == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            self.reach("stepped")
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)]


class WassersteinGan(Manual):
    """Several steps of the critic for one of the generator, a penalty of gradients, and a generator at times only."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.nn.Linear(3, 4)
        self.critic = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Softplus(), torch.nn.Linear(8, 1))

    def penalty(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        mixed = (0.3 * real + 0.7 * fake).requires_grad_(True)
        [gradient] = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty: torch.Tensor = (gradient.norm(2, dim=1) - 1).square().mean()
        return penalty

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        inputs, _ = self.samples(batch)
        optimizers: Any = self.optimizers()
        optimizer_g, optimizer_c = optimizers
        for turn in range(3):
            fake = self.generator(inputs[:, :3] * (turn + 1)).detach()
            loss = self.critic(fake).mean() - self.critic(inputs).mean() + 10 * self.penalty(inputs, fake)
            optimizer_c.zero_grad()
            self.manual_backward(loss)
            optimizer_c.step()
            self.reach("between")
        if batch_idx % 2 == 0:
            optimizer_g.zero_grad()
            self.manual_backward(-self.critic(self.generator(inputs[:, :3])).mean())
            optimizer_g.step()
        self.reach("stepped")
        self.log_dict({"critic": loss}, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return (
            {"optimizer": torch.optim.RMSprop(self.generator.parameters(), lr=0.01)},
            {"optimizer": torch.optim.RMSprop(self.critic.parameters(), lr=0.01)},
        )


class ActorCritic(Manual):
    """Two losses of one graph, steps with closures, a target that follows at a batch's end, a rate by the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(4, 8)
        self.actor, self.critic = torch.nn.Linear(8, 2), torch.nn.Linear(8, 1)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = self.samples(batch)
        optimizers: Any = self.optimizers()
        actor, critic = optimizers
        seen = self.encoder(inputs).tanh()
        value = functional.mse_loss(self.critic(seen), targets + 0.5 * self.target(seen).detach())

        critic.zero_grad()
        self.manual_backward(value, retain_graph=True)
        self.reach("between")

        def closure() -> torch.Tensor:
            actor.zero_grad()
            policy: torch.Tensor = -(self.actor(seen).log_softmax(1)[:, :1] * targets).mean()
            self.manual_backward(policy)
            return policy

        critic.step()
        with actor.toggle_model():
            actor.step(closure)
        self.reach("stepped")
        self.log("value", value, on_step=False, on_epoch=True, sync_dist=True)
        return value

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                slow.lerp_(fast, 0.2)

    def on_train_epoch_end(self) -> None:
        schedulers: Any = self.lr_schedulers()
        by_epoch, by_value = schedulers
        by_value.step(self.trainer.callback_metrics["value"])
        by_epoch.step()

    def configure_optimizers(self) -> Any:
        actor = torch.optim.AdamW([*self.encoder.parameters(), *self.actor.parameters()], lr=0.01)
        critic = torch.optim.AdamW(self.critic.parameters(), lr=0.02)
        by_value = torch.optim.lr_scheduler.ReduceLROnPlateau(critic, factor=0.5, patience=0, threshold=0.5)
        return [actor, critic], [torch.optim.lr_scheduler.StepLR(actor, 1, 0.9), by_value]


class Centered(torch.nn.Module):
    """A running mean, as a batch norm has, of batches of one sample too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0).to(self.mean), 0.1)
        return inputs - self.mean


class Centering(Accumulating):
    """With buffers, which DDP sends before it calls the module; and the module calls itself."""

    every = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, Centered())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self(batch[0].to(next(self.parameters()).dtype)).shape == (len(batch[0]), 1)
        return super().training_step(batch, batch_idx)


MODELS: dict[str, type[Manual]] = {
    "gan": Gan,
    "accumulating": Accumulating,
    "wasserstein": WassersteinGan,
    "actor-critic": ActorCritic,
    "centered": Centering,
}
