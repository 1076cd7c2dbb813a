"""The networks of the five papers, and a few small ones: `fs.models.make("cnn-dlsgd", inputs=(3, 32, 32))`.

Names end in the method of the paper they come from. Without arguments a network is the paper's own; `inputs` is the
shape of one example, `classes` the number of outputs. None keeps statistics of batches (GroupNorm instead of
BatchNorm), and dropout layers are modules, so all of them train under every backend.
"""

import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedstride.errors import FedstrideError, unknown
from fedstride.inputs import whole

Shape = tuple[int, ...]
MNIST, CIFAR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)


def _width(features: nn.Module, inputs: Shape) -> int:
    """How many numbers the features make of one example."""
    with torch.no_grad():
        width = features.eval()(torch.zeros(1, *inputs)).numel()  # no dropout, which would draw random numbers
    features.train()
    return width


def _stage(before: int, after: int, kernel: int, padding: int = 0) -> list[nn.Module]:
    # The ReLU gives the same after the pool as before, on a quarter of the values.
    return [nn.Conv2d(before, after, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU()]


def _one_hidden(features: nn.Module, inputs: Shape, hidden: int, classes: int, dropout: float = 0.0) -> nn.Module:
    """Features, a hidden layer and the outputs; dropout in between, if any."""
    first, dropped = nn.Linear(_width(features, inputs), hidden), [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(features, nn.Flatten(), first, nn.ReLU(), *dropped, nn.Linear(hidden, classes))


def _two_hidden(features: nn.Module, inputs: Shape, hidden: int, classes: int) -> nn.Module:
    """Features, two hidden layers with dropout before each, and the outputs."""
    first, second = nn.Linear(_width(features, inputs), hidden), nn.Linear(hidden, hidden)
    dense = [nn.Dropout(0.5), first, nn.ReLU(), nn.Dropout(0.5), second, nn.ReLU(), nn.Linear(hidden, classes)]
    return nn.Sequential(features, nn.Flatten(), *dense)


def logistic(inputs: Shape = MNIST, classes: int = 10) -> nn.Module:
    """Multinomial logistic regression (FedaGrac): 7,850 parameters; 248 for a9a, inputs 123 and classes 2."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(inputs), classes))


def mlp(inputs: Shape = DIGITS, classes: int = 10, hidden: int = 64) -> nn.Module:
    """One hidden layer, by default for the 8 x 8 digits: 4,810 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(inputs), hidden), nn.ReLU(), nn.Linear(hidden, classes))


def cnn(inputs: Shape = DIGITS, classes: int = 10) -> nn.Module:
    """A small network for small images, by default the 8 x 8 digits: 9,258 parameters."""
    features = nn.Sequential(*_stage(inputs[0], 16, 3, 1), *_stage(16, 32, 3, 1))
    return _one_hidden(features, inputs, 32, classes)


def cnn_fedagrac(inputs: Shape = MNIST, classes: int = 10) -> nn.Module:
    """FedaGrac's two-layer CNN for Fashion-MNIST: 21,840 parameters."""
    second = [nn.Conv2d(10, 20, 5), nn.Dropout2d(0.5), nn.MaxPool2d(2), nn.ReLU()]
    return _one_hidden(nn.Sequential(*_stage(inputs[0], 10, 5), *second), inputs, 50, classes, dropout=0.5)


def alexnet_fedagrac(inputs: Shape = CIFAR, classes: int = 10) -> nn.Module:
    """FedaGrac's AlexNet for CIFAR-10: 7,212,874 parameters."""
    features = nn.Sequential(
        nn.Conv2d(inputs[0], 64, 11, stride=4, padding=5), nn.MaxPool2d(2), nn.ReLU(), *_stage(64, 192, 5, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        *_stage(256, 256, 3, 1),
    )  # fmt: skip
    return _two_hidden(features, inputs, 2048, classes)


def vgg19_fedagrac(inputs: Shape = CIFAR, classes: int = 10) -> nn.Module:
    """FedaGrac's VGG-19 for CIFAR-10, without normalisation: 20,554,826 parameters.

    Convolutions start as in the authors' code (He et al., 2015, fan-out): from torch's own start nothing of the image
    gets through sixteen layers, and the gradient of the first is of order 1e-8.
    """
    features, channels = nn.Sequential(), inputs[0]
    for width, layers in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(layers):
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            nn.init.constant_(convolution.bias, 0)  # type: ignore[arg-type]
            features.extend([convolution, nn.ReLU()])
            channels = width
        features.append(nn.MaxPool2d(2))
    return _two_hidden(features, inputs, 512, classes)


class Plane(nn.Module):
    """A plane through the origin, starting at zero, with one output [B]."""

    def __init__(self, features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, inputs: Tensor) -> Tensor:
        """Heights [B]."""
        return inputs.flatten(1) @ self.weight


def linear(inputs: Shape = (100,)) -> nn.Module:
    """One output, no constant, zero start, for least squares (the o(1/t) paper): 100 weights."""
    return Plane(math.prod(inputs))


def svm_fedveca(inputs: Shape = MNIST) -> nn.Module:
    """FedVeca's squared SVM for even and odd digits: 784 weights, no bias, zero start.

    It goes with `loss=fs.losses.parity_hinge`, `metrics={"accuracy": fs.models.parity_accuracy}` and
    `weight_decay=0.1` (the paper's regulariser, 0.05 |w|^2, which its losses contain; rows have it as `penalty`).
    """
    return Plane(math.prod(inputs))


def sign_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of outputs [B] with the sign of their target, -1 or +1; for `metrics` of a run."""
    return (outputs * targets > 0).double().mean()


def parity_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of outputs [B] that are positive for even labels and negative for odd ones."""
    return sign_accuracy(outputs, 1 - 2 * (targets % 2))


def cnn_fedveca(inputs: Shape = MNIST, classes: int = 10) -> nn.Module:
    """FedVeca's CNN: 430,698 parameters for MNIST, 555,178 for CIFAR-10 (the paper prints one size for both).

    The code FedVeca descends from has local response normalisation and another start, which the paper does not mention.
    """
    features = nn.Sequential(*_stage(inputs[0], 32, 5, 2), *_stage(32, 32, 5, 2))
    return _one_hidden(features, inputs, 256, classes)


def cnn_dlsgd(inputs: Shape = MNIST, classes: int = 10) -> nn.Module:
    """DLSGD's CNN: 582,026 parameters for Fashion-MNIST, 878,538 for CIFAR-10.

    The paper gives no channels; 32 and 64 follow from its latent size of 1600, model sizes and operation counts.
    """
    features = nn.Sequential(*_stage(inputs[0], 32, 5), *_stage(32, 64, 5))
    return _one_hidden(features, inputs, 512, classes)


def mlp_fedlga(inputs: Shape = MNIST, classes: int = 10) -> nn.Module:
    """FedLGA's two-layer MLP for Fashion-MNIST, 784-400-10: 318,010 parameters."""
    return mlp(inputs, classes, hidden=400)


def cnn_tracking(inputs: Shape = CIFAR, classes: int = 10) -> nn.Module:
    """The CNN of the o(1/t) paper: 620,362 parameters for CIFAR-10, 643,492 for CIFAR-100.

    The paper does not state the kernels; they are 3 x 3 here, with padding.
    """
    features = nn.Sequential(*_stage(inputs[0], 32, 3, 1), *_stage(32, 64, 3, 1), *_stage(64, 128, 3, 1))
    return _one_hidden(features, inputs, 256, classes, dropout=0.25)


def _convolution(before: int, after: int, kernel: int, stride: int) -> list[nn.Module]:
    """A convolution and its norm: 32 groups, as Wu and He advise, but of two channels at least."""
    convolution = nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [convolution, nn.GroupNorm(min(32, after // 2), after)]


class Block(nn.Module):
    """The basic residual block of He et al."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        first, second = _convolution(before, after, 3, stride), _convolution(after, after, 3, 1)
        self.residual = nn.Sequential(*first, nn.ReLU(), *second)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(before, after, 1, stride))

    def forward(self, inputs: Tensor) -> Tensor:
        """Residual plus shortcut."""
        return torch.relu(self.residual(inputs) + self.shortcut(inputs))


def _resnet(stem: list[nn.Module], widths: Shape, blocks: int, inputs: Shape, classes: int) -> nn.Module:
    features, before = nn.Sequential(*stem), widths[0]
    for number, width in enumerate(widths):
        for block in range(blocks):
            features.append(Block(before, width, stride=2 if number and not block else 1))
            before = width
    features.append(nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(_width(features, inputs), classes))


def resnet20(inputs: Shape = CIFAR, classes: int = 10) -> nn.Module:
    """He et al.'s ResNet-20 for CIFAR-10, with GroupNorm and 1 x 1 shortcuts: 272,474 parameters."""
    return _resnet([*_convolution(inputs[0], 16, 3, 1), nn.ReLU()], (16, 32, 64), 3, inputs, classes)


def resnet18_fedlga(inputs: Shape = CIFAR, classes: int = 10) -> nn.Module:
    """FedLGA's ResNet for CIFAR-10, read as ResNet-18, with GroupNorm: 11,173,962 parameters.

    The paper states no depth; it resizes the images to 224. Images from 64 pixels get the 7 x 7 stem of He et al. with
    its pool (11,181,642 parameters), smaller ones a 3 x 3 stem.
    """
    stem = [*_convolution(inputs[0], 64, 3, 1), nn.ReLU()]
    if inputs[-1] >= 64:
        stem = [*_convolution(inputs[0], 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    return _resnet(stem, (64, 128, 256, 512), 2, inputs, classes)


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    builder.__name__.replace("_", "-"): builder
    for builder in (
        *(linear, logistic, mlp, cnn, resnet20),
        *(cnn_fedagrac, alexnet_fedagrac, vgg19_fedagrac),
        *(svm_fedveca, cnn_fedveca, cnn_dlsgd, mlp_fedlga, resnet18_fedlga, cnn_tracking),
    )
}


def names() -> list[str]:
    """All names that `make` knows."""
    return sorted(BUILDERS)


def make(name: str, *, seed: int = 0, **options: Any) -> nn.Module:
    """A network by its name, its weights drawn from `seed` alone.

    options: `inputs`, the shape of one example, such as (3, 32, 32) or 123; `classes`; and what else the builder of
    that name takes.
    """
    if name not in BUILDERS:
        raise FedstrideError(unknown("model", name, names()))
    known = inspect.signature(BUILDERS[name]).parameters
    for option, value in options.items():
        if option not in known:
            raise FedstrideError(f"model {name} has no option {option!r}; it has {', '.join(known)}")
        options[option] = _shape(value) if option == "inputs" else whole(option, value)
    seed = whole("seed", seed, 0)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the generators of GPUs, too
        try:
            return BUILDERS[name](**options)
        except (RuntimeError, ValueError) as error:
            raise FedstrideError(
                f"model {name} cannot take inputs of shape {options.get('inputs')}: {str(error).splitlines()[0]}; its "
                f"own are {known['inputs'].default}"
            ) from None


def _shape(value: Any) -> Shape:
    """The shape of one example; a number is the length of a vector."""
    try:
        shape = (operator.index(value),) if not isinstance(value, (tuple, list)) else tuple(map(operator.index, value))
    except TypeError:
        shape = ()
    if not shape or min(shape) < 1:
        raise FedstrideError(f"inputs must be the shape of one example, such as (1, 28, 28) or 123, not {value!r}")
    return shape
