"""What travels: a header of plain values, and the vectors the method declares, nothing else.

Vectors go as arrays of the run's type, or of float16 if the run says so; single numbers stay as they are.
Every request and reply names run, client, version, repeat and exchange, so one that is late, doubled or from elsewhere
is known as such.
"""

from collections import namedtuple
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedstride.errors import FedstrideError
from fedstride.wire import narrow, single

FIELD = "field."  # of a message: a plain number, beside the vectors


def pack(header: dict[str, Any], fields: Any, half: bool = False) -> RecordDict:
    """A header and the fields of a message or upload (a NamedTuple of tensors, numbers and Nones, or nothing)."""
    header, arrays = dict(header), {}
    for name, value in zip(getattr(fields, "_fields", ()), fields):
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            arrays[name] = Array((narrow(value) if half and not single(value) else value).reshape(-1).numpy())
        elif value is not None:
            header[FIELD + name] = value
    return RecordDict({"header": ConfigRecord(header), "vectors": ArrayRecord(arrays)})


def unpack(content: RecordDict) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and fields; refused in words where it is not of this form."""
    fields: dict[str, Any] = {}
    try:
        header = dict(content.config_records["header"])
        for name, packed in content.array_records["vectors"].items():
            array = packed.numpy()
            if array.dtype not in (np.float16, np.float32, np.float64) or array.ndim != 1:
                raise FedstrideError(f"the vector {name!r} has type {array.dtype} and shape {array.shape}")
            fields[name] = torch.from_numpy(array.copy())
    except FedstrideError:
        raise
    except Exception as error:  # whatever a stranger's bytes may bring
        raise FedstrideError(f"a message without header and vectors came: {error!r}") from None
    for name in [name for name in header if name.startswith(FIELD)]:
        fields[name.removeprefix(FIELD)] = header.pop(name)
    return header, fields


def rows(fields: dict[str, Any], like: Tensor, kind: type | None = None) -> Any:
    """Fields as a NamedTuple of [1, ...] rows of the run's type: of a kind, or of one made for them."""
    values = {
        name: value.to(like.device, like.dtype).reshape(1, -1) if isinstance(value, Tensor) else value
        for name, value in fields.items()
    }
    if kind is tuple or (kind is None and not values):
        return ()
    if kind is None:
        return namedtuple("Upload", values)(**values)
    names = kind._fields  # type: ignore[attr-defined]
    if not set(values) <= set(names):
        raise FedstrideError(f"a message has the fields {sorted(values)}, expected are {list(names)}")
    return kind(*(values.get(name) for name in names))
