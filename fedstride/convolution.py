"""Convolutions of many clients at once, every client with a kernel of its own.

`vmap` makes a grouped convolution of them, for which no fast code exists. On a CUDA device a convolution here is a
matrix product for every client, one operand of which is gathered from the image while it is multiplied: implicit
patches, by the two programs of fedstride/kernels.py. A convolution and its two gradients are bilinear and each other's
gradients, so derivatives of any order exist. The gradient of the bias is summed on the way to that of the kernel.

Other types than float32 and bfloat16, strides in the gradient of the input, and CPUs go the ordinary way.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from fedstride.vector import VectorModel


@torch.library.custom_op("fedstride::convolve_rows", mutates_args=())
def convolve_rows(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Convolutions: [C, B, I, H, W], [C, O, I, K, K'] and perhaps [C, O] -> [C, B, O, H', W']."""
    if _quick(x):
        from fedstride.kernels import product

        return product(x, w, stride, padding, padding, bias)
    biases = [None] * len(x) if bias is None else bias
    return torch.stack([functional.conv2d(*own, stride, padding) for own in zip(x, w, biases)])


@torch.library.custom_op("fedstride::convolve_back_rows", mutates_args=())
def convolve_back_rows(g: Tensor, w: Tensor, stride: int, padding: int, height: int, width: int) -> Tensor:
    """The gradients of the inputs: [C, B, O, H', W'] and [C, O, I, K, K'] -> [C, B, I, H, W]."""
    if _quick(g) and stride == 1:
        from fedstride.kernels import product

        return product(g, w, 1, w.shape[3] - 1 - padding, w.shape[4] - 1 - padding, None, turned=True)
    shape = (g.shape[1], w.shape[2], height, width)
    return torch.stack([conv2d_input(shape, own, at, stride, padding) for at, own in zip(g, w)])


@torch.library.custom_op("fedstride::correlate_rows", mutates_args=())
def correlate_rows(x: Tensor, g: Tensor, stride: int, padding: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Gradients of kernels and biases: [C, B, I, H, W], [C, B, O, H', W'] -> [C, O, I, height, width], [C, O]."""
    if _quick(x):
        from fedstride.kernels import sums

        return sums(x, g, stride, padding, height, width)
    shape = (g.shape[2], x.shape[2], height, width)
    kernels = torch.stack([conv2d_weight(at, shape, own, stride, padding) for at, own in zip(x, g)])
    return kernels, g.sum((1, 3, 4))


@torch.library.custom_op("fedstride::add_correlation", mutates_args=("y",))
def add_correlation(
    y: Tensor, lr: Tensor, x: Tensor, g: Tensor, stride: int, padding: int, height: int, width: int,
    shift: Tensor | None, decay: float,
) -> Tensor:  # fmt: skip
    """y <- y - lr (gradient of the kernels + decay y + shift), as in fedstride/products.py; the gradient of biases."""
    if _quick(x) and y.dtype == torch.float32:
        from fedstride.kernels import sums

        return sums(x, g, stride, padding, height, width, (y, lr, shift, decay))[1]
    gradient, bias = correlate_rows(x, g, stride, padding, height, width)
    way = torch.add(gradient.flatten(1), y, alpha=decay)
    y.addcmul_(way if shift is None else way + shift, lr, value=-1)
    return bias


def _quick(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16)


def _out(size, kernel, stride, padding):
    return (size + 2 * padding - kernel) // stride + 1


@convolve_rows.register_fake
def _(x, w, bias, stride, padding):
    size = (_out(x.shape[at], w.shape[at], stride, padding) for at in (-2, -1))
    return x.new_empty(*x.shape[:-3], w.shape[-4], *size)


@convolve_back_rows.register_fake
def _(g, w, stride, padding, height, width):
    return g.new_empty(*g.shape[:-3], w.shape[-3], height, width)


@correlate_rows.register_fake
def _(x, g, stride, padding, height, width):
    return x.new_empty(*x.shape[:-4], g.shape[-3], x.shape[-3], height, width), g.new_empty(*g.shape[:-4], g.shape[-3])


@add_correlation.register_fake
def _(y, lr, x, g, stride, padding, height, width, shift, decay):
    return g.new_empty(*g.shape[:-4], g.shape[-3])


class Bilinear(torch.autograd.Function):
    """What the three operations share: two tensors, then numbers of which the first two are stride and padding."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep both tensors for the gradients."""
        ctx.save_for_backward(*inputs[:2])
        ctx.stride, ctx.padding = inputs[2:4]


def _rows(info, dims, *tensors):
    """The clients' tensors; one that all share is repeated."""
    return [
        part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0) if dim else part
        for part, dim in zip(tensors, dims)
    ]


class Convolve(Bilinear):
    """[B, I, H, W], [O, I, K, K'] and perhaps a bias [O] -> [B, O, H', W']."""

    @staticmethod
    def forward(x, w, stride, padding, bias):
        """One client."""
        return functional.conv2d(x, w, bias, stride, padding)

    @staticmethod
    def vmap(info, dims, x, w, stride, padding, bias):
        """All clients."""
        x, w = _rows(info, dims, x, w)
        own = None if bias is None else _rows(info, dims[-1:], bias)[0]
        return convolve_rows(x, w, own, stride, padding), 0

    @staticmethod
    def backward(ctx, g):
        """By the other two."""
        x, w = ctx.saved_tensors
        gx = ConvolveBack.apply(g, w, ctx.stride, ctx.padding, *x.shape[-2:]) if ctx.needs_input_grad[0] else None
        gw, gb = Correlate.apply(x, g, ctx.stride, ctx.padding, *w.shape[-2:])
        return gx, gw, None, None, gb if ctx.needs_input_grad[4] else None


class ConvolveBack(Bilinear):
    """The gradient of the input: [B, O, H', W'] and [O, I, K, K'] -> [B, I, H, W]."""

    @staticmethod
    def forward(g, w, stride, padding, height, width):
        """One client."""
        return conv2d_input((len(g), w.shape[1], height, width), w, g, stride, padding)

    @staticmethod
    def vmap(info, dims, g, w, *numbers):
        """All clients."""
        return convolve_back_rows(*_rows(info, dims, g, w), *numbers), 0

    @staticmethod
    def backward(ctx, h):
        """By the other two."""
        g, w = ctx.saved_tensors
        gw, _ = Correlate.apply(h, g, ctx.stride, ctx.padding, *w.shape[-2:])
        return Convolve.apply(h, w, ctx.stride, ctx.padding, None), gw, None, None, None, None


class Correlate(Bilinear):
    """The gradients of kernel and bias: [B, I, H, W] and [B, O, H', W'] -> [O, I, height, width] and [O]."""

    @staticmethod
    def forward(x, g, stride, padding, height, width):
        """One client."""
        return conv2d_weight(x, (g.shape[1], x.shape[1], height, width), g, stride, padding), g.sum((0, 2, 3))

    @staticmethod
    def vmap(info, dims, x, g, *numbers):
        """All clients."""
        return correlate_rows(*_rows(info, dims, x, g), *numbers), (0, 0)

    @staticmethod
    def backward(ctx, h, hb):
        """By the other two."""
        x, g = ctx.saved_tensors
        gx = ConvolveBack.apply(g, h, ctx.stride, ctx.padding, *x.shape[-2:])
        return gx, Convolve.apply(x, h, ctx.stride, ctx.padding, hb), None, None, None, None


class Convolution(nn.Conv2d):
    """A `Conv2d` computed by `Convolve`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs [B, O, H', W']."""
        return Convolve.apply(inputs, self.weight, self.stride[0], self.padding[0], self.bias)


def _ordinary(layer: nn.Module) -> bool:
    """Whether a layer is a convolution that `Convolve` computes: nothing dilated, grouped or oblong."""
    return (
        type(layer) is nn.Conv2d
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.stride[0] == layer.stride[1]
        and layer.padding in ((0, 0), (layer.padding[0], layer.padding[0]))
        and layer.padding_mode == "zeros"
    )


def by_rows(model: VectorModel) -> VectorModel:
    """The same model with the convolutions of this file."""
    model = copy.copy(model)
    model.module = copy.deepcopy(model.module)
    for layer in model.module.modules():
        if _ordinary(layer):
            layer.__class__ = Convolution
    return model
