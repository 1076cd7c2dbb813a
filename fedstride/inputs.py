"""What a user may pass: checked here, before anything runs, with one sentence for every mistake."""

import dataclasses
import hashlib
import numbers
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstride import participation as participations
from fedstride import steps as step_rules
from fedstride.algorithm import Algorithm
from fedstride.clients import Clients
from fedstride.descent import Augment, Local
from fedstride.errors import FedstrideError
from fedstride.guards import Norms
from fedstride.losses import Loss, LossFunction, cross_entropy
from fedstride.privacy import Gaussian
from fedstride.results import Target
from fedstride.robust import Robust
from fedstride.sampling import Sampler
from fedstride.schedule import Deadline, Schedule
from fedstride.vector import VectorModel
from fedstride.world import Pace


def whole(name: str, value: Any, low: int = 1) -> int:
    """A whole number from `low`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if number < low:
        raise FedstrideError(f"{name} must be a whole number from {low}, not {value!r}")
    return number


def real(name: str, value: Any, low: float = -float("inf")) -> float:
    """A finite number from `low`."""
    if not isinstance(value, numbers.Real) or not np.isfinite(float(value)) or value < low:
        raise FedstrideError(
            f"{name} must be a number{'' if low == -float('inf') else f' from {low:g}'}, not {value!r}"
        )
    return float(value)


def rate(lr: Any, count: int) -> Callable[[int], Any]:
    """A learning rate as a function of the round."""
    if callable(lr):
        return lr
    try:
        rates = np.asarray(lr, dtype=np.float64)
    except (TypeError, ValueError):
        raise FedstrideError(
            f"lr must be a number, one number a client, or a function of the round, not {lr!r}"
        ) from None
    if rates.ndim > 1 or rates.size not in (1, count):
        raise FedstrideError(f"lr lists {rates.size} numbers for {count} clients; give one, or one a client")
    if not np.isfinite(rates).all() or (rates <= 0).any():
        raise FedstrideError(f"lr must be positive, not {lr!r}")
    return lambda round: rates


def budget(seconds: Any, world: Any, method: Algorithm) -> float:
    """How many virtual seconds a run may take."""
    if seconds is None:
        return float("inf")
    if method.pooled:
        raise FedstrideError(f"{method.name} takes no virtual time, so seconds cannot end it; give rounds alone")
    if world is None:
        raise FedstrideError(
            "seconds need a world in which work takes time, such as fs.World(devices=0.01), in a description "
            "world.devices=0.01"
        )
    if real("seconds", seconds) <= 0:
        raise FedstrideError(f"seconds must be positive, not {seconds!r}")
    return float(seconds)


def device(name: Any) -> torch.device:
    """The device to run on; `auto` is a GPU where torch sees one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError):
        raise FedstrideError(f"unknown device {name!r}; use 'auto', 'cpu', 'cuda' or 'cuda:0'") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise FedstrideError("device 'cuda' was asked for, but torch sees no GPU here; use device='cpu'")
    if found.type not in ("cpu", "cuda"):
        raise FedstrideError(f"device {name!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:0'")
    return found


def local(method: Algorithm, momentum: Any, weight_decay: Any, clip: Any) -> Local:
    """Options of the local optimiser, as far as the method allows them."""
    options = {"momentum": momentum, "weight_decay": weight_decay, "clip": clip}
    for name, value in options.items():
        if not isinstance(value, numbers.Real) and not (name == "clip" and value is None):
            raise FedstrideError(f"{name} must be a number, not {value!r}")
    if not 0 <= momentum < 1:
        raise FedstrideError(f"momentum must be in [0, 1), not {momentum!r}")
    if not 0 <= weight_decay < float("inf"):
        raise FedstrideError(f"weight_decay must be a number from 0, not {weight_decay!r}")
    if clip is not None and not clip > 0:
        raise FedstrideError(f"clip must be positive, not {clip!r}")
    for name, value in options.items():
        if value and name not in method.local_options:
            own = f"; it has a field {name} of its own" if hasattr(method, name) else ""
            allowed = ", ".join(sorted(method.local_options)) or "none"
            raise FedstrideError(
                f"{method.name} does not allow local {name}{own}; of these options it allows {allowed}"
            )
    return Local(momentum, weight_decay, clip)


def participation(method: Algorithm, given: Any, schedule: Any) -> participations.Participation:
    """Who takes part: from the argument or from the schedule, not from both."""
    if not isinstance(schedule, Schedule):
        raise FedstrideError(
            "schedule must come from fs.schedule (Sync, Deadline, Buffered, FirstArrivals, SendBuffers, Replay), "
            f"not {schedule!r}"
        )
    if given is not None and schedule.asynchronous:
        raise FedstrideError(
            f"{method.name} runs on {schedule!r}, which decides itself who takes part; leave participation out, or ask "
            "for rounds with schedule=fs.schedule.Sync()"
        )
    if given is not None and schedule.participation is not None:
        raise FedstrideError("participation is given twice: in the schedule and on its own; give one of them")
    who = participations.resolve(given if schedule.participation is None else schedule.participation)
    if method.full_only and not who.everyone:
        raise FedstrideError(f"{method.name} needs every client in every round; use participation=None, not {who}")
    return who


def check_schedule(
    method: Algorithm, schedule: Schedule, rule: step_rules.Steps, count: int, rounds: int, remembers: bool
) -> None:
    """Refuse a schedule that the method, its steps or the fleet cannot live with."""
    schedule.check(count, rounds)
    name, reason = type(schedule).__name__, unfit(method, schedule, remembers)
    if reason:
        raise FedstrideError(f"{method.name} cannot run on {name}: it {reason}; use fs.schedule.Sync() or .Deadline")
    if schedule.asynchronous and method.local_steps is None and not rule.single:
        raise FedstrideError(f"{rule!r} is a rule for whole cohorts, which {name} does not have; give other steps")


def unfit(method: Algorithm, schedule: Schedule, remembers: bool) -> str:
    """Why a method, which keeps memories on its clients or not, cannot run on a schedule; empty if it can."""
    if not schedule.asynchronous:
        return ""
    if method.pooled:
        return "has no clients"
    if method.assigns:
        return "assigns the clients' steps round by round"
    if len(method.exchanges) > 1:
        return f"has {len(method.exchanges)} exchanges a round"
    if method.full_only:
        return "needs every client in every round"
    if remembers and schedule.memoryless:
        return "keeps memories on its clients, which here train on before the server has seen their last update"
    return ""


def check_time(method: Algorithm, world: Any, schedule: Schedule, pace: Pace) -> None:
    """Refuse time that the method or the fleet cannot live with."""
    deadline = schedule if isinstance(schedule, Deadline) else None
    if deadline is not None and world is None:
        raise FedstrideError(
            "a deadline needs a world in which work takes time, such as fs.World(devices=0.01), in a description "
            "world.devices=0.01"
        )
    if deadline is not None and deadline.seconds < pace.quickest:
        raise FedstrideError(
            f"a deadline of {deadline.seconds:g} s is too short: the fastest client needs {pace.quickest:g} s for one "
            "step"
        )
    if method.full_only and (pace.lossy or (deadline is not None and deadline.late == "drop")):
        raise FedstrideError(
            f"{method.name} needs every client in every round; a world with absences or a deadline that drops cannot "
            "give that"
        )


def check_protection(
    method: Algorithm, schedule: Schedule, who: Any, count: int, rounds: int, guard: Any, robust: Any, privacy: Any
) -> None:
    """Refuse guards, robust means and privacy that do not go with the run or with each other."""
    for name, given, kind, example in (
        ("guard", guard, Norms, "fs.guards.Norms(bound=10)"),
        ("robust", robust, Robust, "fs.robust.TrimmedMean(share=0.2)"),
        ("privacy", privacy, Gaussian, "fs.privacy.Gaussian(clip=1, noise=1)"),
    ):
        if given is not None and not isinstance(given, kind):
            raise FedstrideError(f"{name} must be such as {example}, not {given!r}")
    if guard is not None:
        guard.check(schedule)
    if robust is not None:
        robust.check(method, schedule, who, count)
    if privacy is None:
        return
    if robust is not None:
        raise FedstrideError("privacy knows how far one client can move a sum, not a trimmed one; leave robust out")
    if guard is not None and guard.times is not None:
        raise FedstrideError(
            "with privacy no upload may decide whether another is used, as the guard's median does; give the guard a "
            "bound instead of times"
        )
    privacy.check(method, schedule, who, count, rounds)


def goal(stop: Any, test: Any, train_loss: bool) -> Target | None:
    """A target that this run can reach."""
    if stop is None:
        return None
    if not isinstance(stop, Target):
        raise FedstrideError(f"stop must be a Target, such as fs.Target(accuracy=0.8), not {stop!r}")
    if test is None and (stop.accuracy is not None or stop.loss is not None):
        raise FedstrideError("the target needs test data; pass test=(inputs, targets)")
    if stop.train_loss is not None and not train_loss:
        raise FedstrideError("the target is a train_loss, which is not measured; pass train_loss=True")
    return stop


def check_batches(vector: VectorModel, clients: Clients, sampler: Sampler) -> None:
    """Batch statistics need two examples in every batch."""
    if not vector.normalises or callable(sampler.sampling):
        return
    size, sizes = sampler.batch_size, clients.sizes
    if size is None:
        smallest = int(sizes.min())
    else:
        smallest = int(np.where(sizes % size, sizes % size, size).min()) if sampler.sampling == "shuffle" else size
    if smallest < 2:
        raise FedstrideError("the model has BatchNorm layers, but some batch would have one example; use GroupNorm")


def augmentation(augment: Any, sampler: Sampler) -> Augment | None:
    """An augmentation that can take the clients' mini-batches and keeps their shape and type."""
    if augment is None:
        return None
    if not callable(augment):
        raise FedstrideError(f"augment must be a function (inputs, keys), such as fs.data.crop_flip(), not {augment!r}")
    if sampler.full:
        raise FedstrideError("augment changes mini-batches, and batch_size=None asks for none; give a batch_size")
    examples = sampler.clients.data(0)[0][None, :2]
    try:
        changed = augment(examples, torch.zeros(1, dtype=torch.int64, device=examples.device))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise FedstrideError(f"augment cannot take the clients' inputs: {str(error).splitlines()[0]}") from None
    if not isinstance(changed, Tensor) or changed.shape != examples.shape or changed.dtype != examples.dtype:
        raise FedstrideError("augment must return inputs of the shape and type it is given")
    return augment


def check_labels(clients: Clients, loss: LossFunction, outputs: Tensor) -> None:
    """Class labels must be among the model's outputs."""
    targets = clients.targets
    known = loss in (cross_entropy, F.cross_entropy) or isinstance(loss, nn.CrossEntropyLoss)
    if not known or outputs.dim() != 2 or targets.dim() != 1 or targets.is_floating_point():
        return
    bad = (targets < 0) | (targets >= outputs.shape[1])
    bad &= targets != getattr(loss, "ignore_index", -100)
    rows = bad[clients.order].nonzero()
    if len(rows):
        client = int(np.searchsorted(clients.offsets, int(rows[0]), side="right")) - 1
        label = int(targets[clients.order[rows[0]]])
        raise FedstrideError(f"client {client} has label {label}; the model has outputs 0 to {outputs.shape[1] - 1}")


def identity(
    method: Algorithm, vector: VectorModel, clients: Clients, rule: step_rules.Steps, who: Any, **settings: Any
) -> dict[str, Any]:
    """What makes a run this run: a checkpoint must agree in all of it (lists of rounds as far as they were played)."""
    fields = dataclasses.fields(method)  # type: ignore[arg-type]
    return {
        "method": method.name,
        "options": {field.name: repr(getattr(method, field.name)) for field in fields},
        "model": vector.signature,
        "network": vector.layers,
        "frozen part": vector.frozen,
        "clients": [len(clients), _digest(clients)],
        "steps": rule.table.tolist() if isinstance(rule, step_rules.Listed) else repr(rule),
        "participation": who.cohorts if isinstance(who, participations.Listed) else repr(who),
    } | {name: _described(value) for name, value in settings.items()}


def _digest(clients: Clients) -> str:
    """Who holds which examples; of the examples themselves the labels and a few."""
    inputs = clients.inputs[:: max(1, len(clients.inputs) // 64)]
    parts = (clients.order, clients.targets, inputs)
    known = hashlib.sha256(clients.sizes.tobytes())
    for part in parts:
        known.update(part.cpu().contiguous().numpy().tobytes())
    return known.hexdigest()[:16]


def _described(value: Any) -> Any:
    """A setting as JSON; functions go by their names, because nothing more of them can be compared."""
    if isinstance(value, Loss):
        return f"{value.each.__qualname__} {value.reduction}"
    if callable(value) and not isinstance(value, nn.Module):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, (list, tuple, np.ndarray)):
        return np.asarray(value).tolist()
    return value if value is None or isinstance(value, (str, int, float)) else repr(value)
