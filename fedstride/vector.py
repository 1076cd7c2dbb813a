"""Any module as one flat vector.

Trainable parameters are laid end to end in a vector `x` of length d; frozen parameters and buffers are shared by all
clients and never change. So a module that writes its buffers while training (BatchNorm with running statistics) is
refused: those statistics would belong to nobody. GroupNorm and LayerNorm keep none and are fine.

Dropout draws its masks from a key, so that every client, job and step has its own and no backend changes them.

In bfloat16 only the module computes: what it is given is rounded, what it returns is float32 again, and so are its
gradients. Weights, data, memories and the server's algebra stay in float32, so small steps are not lost.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedstride.errors import FedstrideError
from fedstride.keys import fold

# The type a module computes in -> that of weights and data.
KEPT = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)  # settings that text tells
EVERY = frozenset(vars(nn.Module()))  # attributes that all modules have
CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of `key`, a buffer that the caller replaces at every step."""

    key: Tensor

    def __init__(self, p: float, channelwise: bool):
        super().__init__()
        self.p = p
        self.channelwise = channelwise
        self.calls = 0  # in this forward pass: a layer used twice drops different values
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Zero each value (or channel) with probability p and scale the others by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return inputs
        shape = inputs.shape[:2] + (1,) * (inputs.dim() - 2) if self.channelwise else inputs.shape
        counters = torch.arange(math.prod(shape), device=inputs.device)
        bits = (fold(fold(self.key, self.calls), counters) >> 33) & 0x7FFFFFFF
        self.calls += 1
        keep = (bits >= int(self.p * (1 << 31))).view(shape)
        return inputs * keep.to(inputs.dtype) / (1 - self.p) if self.p < 1 else torch.zeros_like(inputs)


def _swap(module: nn.Module) -> nn.Module:
    """Replace dropout by the keyed one; names stay the same."""
    new: dict[str, nn.Module] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, (nn.Dropout, *CHANNELWISE)):
            new[name] = KeyedDropout(child.p, isinstance(child, CHANNELWISE))
    for name, child in new.items():
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, child)
    return module


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of one module that not every module has, and what is hooked to it."""
    for key, value in vars(module).items():
        if key not in EVERY:
            yield key, value
        elif key.endswith("_hooks") and value:
            yield key, list(value.values())


def _leaves(value: Any) -> Iterator[Any]:
    """What lists, tuples and dicts hold; anything else is taken as it is."""
    if type(value) in (list, tuple, dict):
        for one in value.values() if type(value) is dict else value:
            yield from _leaves(one)
    else:
        yield value


def _text(value: Any) -> str:
    if isinstance(value, nn.Parameter):  # it is registered, too
        return "parameter"
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(_bytes(value)).hexdigest()[:16]}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{key}={_text(one)}' for key, one in value.items())})"
    return repr(value) if isinstance(value, PLAIN) else getattr(value, "__qualname__", type(value).__qualname__)


def _bytes(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def rewind(module: nn.Module) -> None:
    """A new forward pass begins."""
    for child in module.modules():
        if isinstance(child, KeyedDropout):
            child.calls = 0


class VectorModel:
    """A module seen as a function of one flat vector."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device | str = "cpu"):
        if dtype not in KEPT:
            raise FedstrideError(f"dtype must be torch.float32, torch.float64 or torch.bfloat16, not {dtype}")
        for name, child in module.named_modules():
            if isinstance(child, _BatchNorm) and child.track_running_stats:
                raise FedstrideError(
                    f"layer {name!r} is a BatchNorm with running statistics, which belong to no single client; use "
                    "GroupNorm, or track_running_stats=False"
                )
        if any(is_lazy(parameter) for parameter in module.parameters()):
            raise FedstrideError("the model has lazy layers without shapes; run an example through it first")
        if dtype != torch.float64 and any(parameter.dtype == torch.float64 for parameter in module.parameters()):
            raise FedstrideError(f"the model is in float64 and would train in {dtype}; pass dtype=torch.float64")
        self.original = module
        self.dtype = dtype
        self.module = _swap(copy.deepcopy(module)).to(device, KEPT[dtype]).train()
        trainable = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        if not trainable:
            raise FedstrideError("the model has no trainable parameters")
        self.names = [name for name, _ in trainable]
        self.shapes = [p.shape for _, p in trainable]
        self.sizes = [p.numel() for _, p in trainable]
        self.dropouts = [name for name, child in self.module.named_modules() if isinstance(child, KeyedDropout)]
        # Statistics over the batch would see padding, so such a model must get whole batches; `probe` finds others.
        self.mixes_examples = self.normalises = any(isinstance(child, _BatchNorm) for child in self.module.modules())
        self.convolves = any(isinstance(child, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for child in module.modules())
        self.kernels = sum(layer.weight.numel() for layer in self._convolutions)
        self.pixels = 0  # numbers that convolutions make of one example, where `probe` finds that layouts may change
        self.x = torch.cat([p.detach().flatten() for _, p in trainable])
        if not torch.isfinite(self.x).all():
            raise FedstrideError("the model's starting weights contain NaN or infinity")
        self.module.to(dtype)

    @property
    def signature(self) -> list[list]:
        """Names and shapes of the trainable parameters, which a checkpoint must match."""
        return [[name, list(shape)] for name, shape in zip(self.names, self.shapes)]

    @property
    def layers(self) -> list[list[str]]:
        """Names, kinds and settings of all modules, as text that is the same in every process.

        What stands in several places is told once; then it says where that was.
        """
        known: dict[int, str] = {}
        found = []
        for name, child in self.original.named_modules(remove_duplicate=False):
            settings = ", ".join(f"{key}={_text(value)}" for key, value in _settings(child))
            text = known.setdefault(id(child), name)
            found.append([name, f"{type(child).__qualname__}({settings})" if text == name else f"= {text}"])
        for name, parameter in self.original.named_parameters(remove_duplicate=False):
            if known.setdefault(id(parameter), name) != name:
                found.append([name, f"= {known[id(parameter)]}"])
        return found

    @property
    def frozen(self) -> str:
        """A digest of what is not trained."""
        known = hashlib.sha256()
        held = [*self.original.named_parameters(), *self.original.named_buffers()]
        for name, value in held:
            if name not in self.names:
                known.update(f"{name} {_text(value.detach())}".encode())
        return known.hexdigest()[:16]

    @property
    def code(self) -> list[int]:
        """What text does not tell of a network, by identity: its classes, and the objects in its settings."""
        children = list(self.original.modules())
        values = _leaves([value for child in children for _, value in _settings(child)])
        objects = [value for value in values if not isinstance(value, (*PLAIN, Tensor))]
        return [id(one) for one in [*map(type, children), *objects]]

    def views(self, vector: Tensor) -> list[Tensor]:
        """The vector cut into the parameters' shapes; `split`, because its backward is a single `cat`."""
        return [part.view(shape) for part, shape in zip(vector.split(self.sizes), self.shapes)]

    def dropout_keys(self, step_key: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A key for every dropout layer from the key of one step."""
        return ((name, fold(step_key, index)) for index, name in enumerate(self.dropouts))

    def outputs(self, vector: Tensor | list[Tensor], inputs: Tensor, step_key: Tensor | None = None) -> Tensor:
        """The module's outputs with its trainable parameters taken from the vector, which may be cut already."""
        parts = self.views(vector.to(self.dtype)) if isinstance(vector, Tensor) else [p.to(self.dtype) for p in vector]
        tensors = dict(zip(self.names, parts))
        if self.dropouts:
            rewind(self.module)
        if step_key is not None:
            tensors.update((f"{name}.key", value) for name, value in self.dropout_keys(step_key))
        return self.apply(lambda rounded: functional_call(self.module, tensors, (rounded,)), inputs)

    @property
    def _convolutions(self) -> list[nn.Conv2d]:
        return [child for child in self.module.modules() if isinstance(child, nn.Conv2d)]

    def arranged(self, inputs: Tensor) -> Tensor:
        """Images with their channels last where the network is quicker so on a CPU: the same numbers.

        Pooling then takes a tenth of its time; but kernels must be rearranged too, so images have to outweigh them.
        """
        if self.pixels * len(inputs) <= self.kernels:
            return inputs
        return inputs.to(memory_format=torch.channels_last)

    def apply(self, module: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """A module's outputs in the type of the weights, whatever it computes in."""
        if self.dtype == self.x.dtype:
            return module(inputs)
        outputs = module(inputs.to(self.dtype) if inputs.is_floating_point() else inputs)
        return outputs.to(self.x.dtype) if isinstance(outputs, Tensor) else outputs

    @torch.no_grad()
    def predict(self, vector: Tensor, inputs: Tensor, chunk: int = 1024) -> Tensor:
        """Outputs in evaluation mode, in chunks."""
        self.module.eval()
        chunk = len(inputs) if self.mixes_examples else chunk
        try:
            return torch.cat([self.outputs(vector, self.arranged(part)) for part in inputs.split(chunk)])
        finally:
            self.module.train()

    def loaded(self, vector: Tensor) -> nn.Module:
        """A copy of the original module holding the vector."""
        module = copy.deepcopy(self.original)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, part in zip(self.names, self.views(vector)):
                parameters[name].copy_(part)
        return module

    @torch.no_grad()
    def probe(self, inputs: Tensor) -> Tensor:
        """Run a few examples through; refuse modules that fail, write buffers or draw random numbers of their own."""
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        step_key = torch.zeros((), dtype=torch.int64, device=inputs.device)
        with torch.random.fork_rng():
            try:
                outputs = self.outputs(self.x, inputs, step_key)
                again = self.outputs(self.x, inputs, step_key)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise FedstrideError(
                    f"the model cannot take the clients' inputs of shape {tuple(inputs.shape[1:])} and type "
                    f"{inputs.dtype}: {str(error).splitlines()[0]}"
                ) from None
        for name, buffer in self.module.named_buffers():
            if not torch.equal(buffer, before[name]):
                raise FedstrideError(
                    f"the model changes its buffer {name!r} while training; buffers must stay constant"
                )
        if not isinstance(outputs, Tensor):
            raise FedstrideError(f"the model must return one tensor, not {type(outputs).__name__}")
        if not torch.equal(outputs, again):
            raise FedstrideError(
                "the model draws random numbers outside nn.Dropout layers, so its clients could not be told apart; use "
                "nn.Dropout modules instead of functional dropout or noise"
            )
        if not self.mixes_examples and len(inputs) > 1:
            half = len(inputs) // 2
            part = self.outputs(self.x, inputs[:half], step_key)
            self.mixes_examples = not torch.allclose(part, outputs[:half], *self._close(outputs))
        if inputs.dim() == 4 and not inputs.is_cuda:
            self.pixels = self._count_pixels(inputs, step_key, outputs)
        return outputs

    def _count_pixels(self, inputs: Tensor, step_key: Tensor, outputs: Tensor) -> int:
        """Numbers that convolutions make of one example; 0 if the module wants channels first, as `view` may do."""
        made: list[int] = []
        hooks = [
            layer.register_forward_hook(lambda _layer, _inputs, output: made.append(output[0].numel()))
            for layer in self._convolutions
        ]
        try:
            again = self.outputs(self.x, inputs.to(memory_format=torch.channels_last), step_key)
        except Exception:  # whatever a module says of memory it did not expect
            return 0
        finally:
            for hook in hooks:
                hook.remove()
        return sum(made) if torch.allclose(again, outputs, *self._close(outputs)) else 0

    def _close(self, outputs: Tensor) -> tuple[float, float]:
        """Within which the same numbers lie that were computed in another order."""
        return (1e-3, 1e-5) if self.dtype == self.x.dtype else (2e-2, 2e-2 * float(outputs.abs().max()))
