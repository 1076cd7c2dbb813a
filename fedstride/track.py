"""Rows as they come, for TensorBoard and MLflow; both are extras: pip install fedstride[track]."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fedstride.errors import FedstrideError

Follow = Callable[[Any, dict[str, Any]], None]


@contextmanager
def tracker(name: str | None, folder: Path) -> Iterator[Follow]:
    """A function that takes every row of every run; None tracks nothing."""
    if name is None:
        yield lambda plan, row: None
        return
    kinds = {"tensorboard": _tensorboard, "mlflow": _mlflow}
    if name not in kinds:
        raise FedstrideError(f"unknown tracker {name!r}; choose from {', '.join(kinds)}")
    try:
        module = import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError:
        raise FedstrideError(f"tracking with {name} needs the package: pip install {name}") from None
    with kinds[name](module, folder) as follow:
        yield follow


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if isinstance(value, (int, float)) and key != "round"}


@contextmanager
def _tensorboard(module: Any, folder: Path) -> Iterator[Follow]:
    """One event file a run, in FOLDER/tensorboard."""
    writers: dict[Any, Any] = {}

    def follow(plan: Any, row: dict[str, Any]) -> None:
        if plan.folder not in writers:
            writers[plan.folder] = module.SummaryWriter(str(folder / "tensorboard" / plan.folder))
        for key, value in _numbers(row).items():
            writers[plan.folder].add_scalar(key, value, row["round"])

    try:
        yield follow
    finally:
        for writer in writers.values():
            writer.close()


@contextmanager
def _mlflow(module: Any, folder: Path) -> Iterator[Follow]:
    """One MLflow run a run, in the experiment named after the folder."""
    client = module.MlflowClient()
    found = client.get_experiment_by_name(folder.name)
    experiment = found.experiment_id if found else client.create_experiment(folder.name)
    runs: dict[Any, str] = {}

    def follow(plan: Any, row: dict[str, Any]) -> None:
        if plan.folder not in runs:
            runs[plan.folder] = client.create_run(experiment, run_name=str(plan)).info.run_id
            for key, value in plan.experiment.dump().items():
                client.log_param(runs[plan.folder], key, value)
        for key, value in _numbers(row).items():
            client.log_metric(runs[plan.folder], key, value, step=row["round"])

    try:
        yield follow
    finally:
        for run in runs.values():
            client.set_terminated(run)
