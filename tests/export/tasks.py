"""One trained model, and models around it whose export works, or fails, each in its own way."""

# Without annotations of the future: TorchScript reads the annotations of attributes.
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep import LaneBatch, Task

FEATURES, CLASSES = 5, 3


class Net(nn.Module):
    """Dropout and BatchNorm, which must be in evaluation mode in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.gelu(self.norm(self.first(x)))))


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Differentiated(Around):
    """Normalises, and computes its derivative; one method is not marked for TorchScript."""

    names: list[str]

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.register_buffer("mean", torch.linspace(-1, 1, FEATURES))
        self.names = ["a", "b"]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.normalise(x))

    @torch.jit.export
    def normalise(self, x: Tensor) -> Tensor:
        return x - self.mean

    @torch.jit.export
    def scale(self, y: Tensor) -> Tensor:
        return y * torch.ones(3)

    @torch.jit.export
    def jacobian(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        y = self.forward(x)
        rows: list[Tensor] = []
        for index in range(y.size(1)):
            (row,) = torch.autograd.grad([y[:, index].sum()], [x], retain_graph=True)
            assert row is not None
            rows.append(row)
        return torch.stack(rows, 1)

    def probabilities(self, x: Tensor) -> Tensor:
        return self.forward(x).softmax(1)


class Several(Around):
    """Two arguments, and results by name."""

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        logits = self.model(torch.cat([left, right], 1))
        return {"logits": logits, "best": logits.argmax(1)}


class Unscriptable(Around):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.model(x)
        except ZeroDivisionError:
            return x


class Branching(Unscriptable):
    """Takes one of two ways by what is in the batch: a trace knows only one of them."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if x[0, 0] > 0 else -out


class OfOneSize(Unscriptable):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(int(x.shape[0]), -1) + torch.zeros(x.shape[0], 1)


class Unkept(Unscriptable):
    @torch.jit.export
    def twice(self, x: Tensor) -> Tensor:
        return 2 * self.forward(x)


class Twice(Around):
    """One module under two names: its tensors are shared."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.again = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) + self.again(x)


class Forgetful(Around):
    """A part of it is missing from its state_dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.shift = torch.rand(())

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) + self.shift


class Squeezing(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[:, :1].squeeze()


class Samples:
    """Positive first features, then negative ones."""

    def __init__(self, samples: int) -> None:
        self.x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(3)).abs()
        self.x[4:] *= -1
        self.y = torch.arange(samples) % CLASSES

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterator[Any]:
        return iter(list(zip(self.x, self.y, strict=True))[lane::lanes])


class Exported(Task):
    def __init__(self, around: str = "", data: str = "validation") -> None:
        self.around, self.data = around, data

    def model(self) -> nn.Module:
        return Net()

    def train_data(self) -> Any:
        samples = Samples(40)
        return samples if self.data == "stream" else TensorDataset(samples.x, samples.y)

    def valid_data(self) -> Any:
        samples = Samples(7)
        return TensorDataset(samples.x, samples.y) if self.data == "validation" else None

    def collate(self, samples: list[Any]) -> Any:
        x, y = super().collate(samples)
        return {"x": x, "y": y} if self.data == "names" else (x, y)

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)

    def export_model(self, model: nn.Module) -> nn.Module:
        if self.around == "text":
            return "a model"  # type: ignore[return-value]
        made: nn.Module = globals()[self.around](model) if self.around else model
        return made

    def model_inputs(self, batch: LaneBatch, method: str = "forward") -> Any:
        if self.around == "Several":
            return batch.x[:, :2], batch.x[:, 2:]
        if method == "scale":
            return batch.x[:, :CLASSES]
        return super().model_inputs(batch, method)


class Forgotten(Exported):
    """Does not define what `scale` is called with."""

    def model_inputs(self, batch: LaneBatch, method: str = "forward") -> Any:
        return batch.x
