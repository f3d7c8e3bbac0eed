"""Residual networks of 18, 34 and 50 layers.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (arXiv:1512.03385), table 1 and figure 5.
Two choices follow what everybody trains today rather than the paper's letter: shortcuts that change the shape use a
1x1 convolution (option B), and a bottleneck puts its stride on the 3x3 convolution.
"""

from __future__ import annotations

from torch import Tensor, nn

STAGE_BLOCKS: dict[int, tuple[int, int, int, int]] = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
"""Depth to the number of residual blocks in each of the four stages."""

BOTTLENECK_DEPTHS = frozenset({50})


def conv_norm(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias (the normalisation has one) that keeps the image size at stride 1."""
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out))


class Residual(nn.Module):
    """``relu(branch(x) + shortcut(x))``; the shortcut is the identity wherever the shapes allow it.

    Args:
        branch: the residual function.
        channels_in: channels of the input.
        channels_out: channels of the branch's output.
        stride: by how much the branch shrinks height and width.
    """

    def __init__(self, branch: nn.Sequential, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        same_shape = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same_shape else conv_norm(channels_in, channels_out, 1, stride)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        """Maps (N, channels_in, H, W) to (N, channels_out, H / stride, W / stride)."""
        summed: Tensor = self.branch(images) + self.shortcut(images)
        activated: Tensor = self.activation(summed)
        return activated


def basic_block(channels_in: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions (figure 5, left)."""
    branch = nn.Sequential(
        conv_norm(channels_in, width, 3, stride),
        nn.ReLU(inplace=True),
        conv_norm(width, width, 3),
    )
    return Residual(branch, channels_in, width, stride)


def bottleneck_block(channels_in: int, width: int, stride: int) -> Residual:
    """1x1 down to ``width``, 3x3, 1x1 up to four times ``width`` (figure 5, right)."""
    branch = nn.Sequential(
        conv_norm(channels_in, width, 1),
        nn.ReLU(inplace=True),
        conv_norm(width, width, 3, stride),
        nn.ReLU(inplace=True),
        conv_norm(width, 4 * width, 1),
    )
    return Residual(branch, channels_in, 4 * width, stride)


def resnet(depth: int, num_classes: int, *, width: int = 64, small_images: bool = False) -> nn.Sequential:
    """Builds a freshly initialised residual network that maps (N, 3, H, W) to (N, num_classes) logits.

    Args:
        depth: 18, 34 or 50.
        num_classes: number of logits.
        width: channels of the first stage; 64 in the paper. Each later stage doubles it.
        small_images: a 3x3 stem without max pooling, for images of about 32 pixels and less (section 4.2); the paper's
            7x7 stem would leave one pixel of them.

    Raises:
        ValueError: for an unknown depth, or a width or class count below one.
    """
    if depth not in STAGE_BLOCKS:
        raise ValueError(f"no ResNet of depth {depth} here; choose one of {', '.join(map(str, STAGE_BLOCKS))}")
    if width < 1 or num_classes < 1:
        raise ValueError(f"width and num_classes must be at least 1, not {width} and {num_classes}")
    block, expansion = (bottleneck_block, 4) if depth in BOTTLENECK_DEPTHS else (basic_block, 1)
    layers: list[nn.Module] = [_small_stem(width) if small_images else _stem(width)]
    channels = width
    for stage, blocks in enumerate(STAGE_BLOCKS[depth]):
        stage_width = width * 2**stage
        for position in range(blocks):
            stride = 2 if stage > 0 and position == 0 else 1
            layers.append(block(channels, stage_width, stride))
            channels = stage_width * expansion
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    _initialise(network)
    return network


def _stem(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    )


def _small_stem(width: int) -> nn.Sequential:
    return nn.Sequential(conv_norm(3, width, 3), nn.ReLU(inplace=True))


def _initialise(network: nn.Module) -> None:
    # He et al., "Delving Deep into Rectifiers" (arXiv:1502.01852), backward form (section 2.2, equation 14).
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
