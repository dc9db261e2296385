"""A feed-forward emulator that knows its own scales and names. TorchScript compiles this file, which rules out
`from __future__ import annotations`."""

import torch
from torch import Tensor, nn


class Emulator(nn.Module):
    """From the state around to the state of the ice.

    `forward` and `jac` are in scaled numbers, of mean 0 and standard deviation 1; `predict` and `jac_physical`
    in those of the files.
    """

    input_names: list[str]
    output_names: list[str]
    input_levels: list[int]
    output_levels: list[int]
    meta: dict[str, str]

    def __init__(
        self, inputs: dict[str, int], outputs: dict[str, int], meta: dict[str, str], hidden: int, layers: int
    ) -> None:
        """Args:
        inputs: the names of the inputs, with their levels.
        outputs: the same of the outputs.
        meta: what a program that loads the file may want to know.
        hidden: the width of the hidden layers.
        layers: how many there are.
        """
        super().__init__()
        self.input_names, self.input_levels = list(inputs), list(inputs.values())
        self.output_names, self.output_levels = list(outputs), list(outputs.values())
        self.meta = meta
        widths = [len(inputs), *[hidden] * layers]
        parts: list[nn.Module] = []
        for wide, narrow in zip(widths, widths[1:]):  # noqa: B905, RUF007
            parts += [nn.Linear(wide, narrow), nn.GELU()]
        self.layers = nn.Sequential(*parts, nn.Linear(widths[-1], len(outputs)))
        for part in self.layers:
            if isinstance(part, nn.Linear):
                nn.init.xavier_normal_(part.weight)
                nn.init.zeros_(part.bias)
        self.register_buffer("input_mean", torch.zeros(len(inputs)))
        self.register_buffer("input_std", torch.ones(len(inputs)))
        self.register_buffer("output_mean", torch.zeros(len(outputs)))
        self.register_buffer("output_std", torch.ones(len(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    @torch.jit.export
    def normalize_input(self, x: Tensor) -> Tensor:
        return (x - self.input_mean) / self.input_std

    @torch.jit.export
    def normalize_output(self, y: Tensor) -> Tensor:
        return (y - self.output_mean) / self.output_std

    @torch.jit.export
    def denormalize_output(self, y: Tensor) -> Tensor:
        return y * self.output_std + self.output_mean

    @torch.jit.export
    def predict(self, x: Tensor) -> Tensor:
        return self.denormalize_output(self.forward(self.normalize_input(x)))

    @torch.jit.export
    def jac(self, x: Tensor) -> Tensor:
        """d output / d input of each sample, scaled: [batch, outputs, inputs]. Not under no_grad."""
        x = x.detach().requires_grad_(True)
        y = self.forward(x)
        rows: list[Tensor] = []
        for output in range(y.size(1)):
            (row,) = torch.autograd.grad([y[:, output].sum()], [x], retain_graph=True)
            assert row is not None  # for the compiler, which cannot rule out None
            rows.append(row)
        return torch.stack(rows, 1).detach()

    @torch.jit.export
    def jac_physical(self, x: Tensor) -> Tensor:
        """Return the same in the units of the files: d predict / d input."""
        scaled = self.jac(self.normalize_input(x))
        return scaled * self.output_std.unsqueeze(1) / self.input_std.unsqueeze(0)
