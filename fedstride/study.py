"""Several experiments that belong together: methods, seeds and a grid over any field, each run in a folder of its own.

Within a seed all methods see the same clients, the same batches, the same starting weights and the same world, because
every draw has a key. FOLDER/study.toml describes the whole, FOLDER/LABEL/seed-K/experiment.toml a single run.
"""

import itertools
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
import torch

from fedstride import partition, runs
from fedstride.checkpoint import write_whole
from fedstride.choices import Choice
from fedstride.errors import FedstrideError
from fedstride.experiment import Experiment, Prepared, read_toml
from fedstride.inputs import whole
from fedstride.results import Result
from fedstride.scale.pool import Pool, hired
from fedstride.simulate import simulate
from fedstride.statistics import Run
from fedstride.together import Together, able, several

UNSHARED = ("guard", "robust", "privacy", "wire")  # with these, workers cannot share the cohorts of a run
ENDS = ("rounds", "seconds")
RESERVED = ("study.toml", "report.html", "figures", "table.csv", "table.parquet", "tensorboard")


class Planned(NamedTuple):
    """One run of a study."""

    label: str
    experiment: Experiment
    folder: Path  # below that of the study

    def __str__(self) -> str:
        return f"{self.label}, seed {self.experiment.seed}"


class Entry(NamedTuple):
    """A method of a study: what it is called, and what else is different for it."""

    label: str
    changes: dict[str, Any]  # field -> value, the method itself among them


class Study:
    """An experiment, the methods to compare, the seeds, and a grid {field: values}.

    A method is a name, or a table with a name and options. Beside these the table may have `set`, fields of the
    experiment that are different for this method (its own lr, its own schedule), and `label`, what to call it.
    """

    def __init__(
        self,
        experiment: Experiment | dict[str, Any] | None = None,
        methods: Any = None,
        seeds: Any = None,
        grid: dict[str, list[Any]] | None = None,
    ):
        base = experiment.dump() if isinstance(experiment, Experiment) else dict(experiment or {})
        self.base = Experiment.parse(base)
        self.seeds = [self.base.seed] if seeds is None else _seeds(seeds)
        methods = [self.base.method.model_dump()] if methods is None else methods
        if not isinstance(methods, (list, tuple)) or not methods:
            raise FedstrideError(f"methods must be a list of names or tables with a name, not {methods!r}")
        self.methods = methods
        self.grid = {} if grid is None else grid
        if not isinstance(self.grid, dict) or not all(isinstance(v, (list, tuple)) and v for v in self.grid.values()):
            raise FedstrideError(f"grid must give every field a list of values, such as lr = [0.01, 0.1], not {grid!r}")
        self.plans = list(self._plans())
        folders = {plan.folder.parent: plan.label for plan in self.plans}
        for plan in self.plans:
            name, other = plan.folder.parent.name, folders[plan.folder.parent]
            if other != plan.label:
                raise FedstrideError(f"{plan.label!r} and {other!r} would share a folder; give another label")
            if not name.strip(". ") or len(name) > 120 or name in RESERVED:
                raise FedstrideError(f"{plan.label!r} cannot be the name of a folder; give another label")
        for label in {plan.label for plan in self.plans}:
            if sum(plan.label == label for plan in self.plans) > len(self.seeds):
                raise FedstrideError(
                    f"the study holds {label!r} twice; every method and grid value may stand there once"
                )

    @classmethod
    def parse(cls, description: dict[str, Any]) -> "Study":
        """From a nested dict: the fields of an experiment, and `methods`, `seeds` and `grid`."""
        rest = dict(description)
        if "method" in rest and "methods" in rest:
            raise FedstrideError("a study has method or methods, not both; leave one of them out")
        if "seed" in rest and "seeds" in rest:
            raise FedstrideError("a study has seed or seeds, not both; leave one of them out")
        given = {name: rest.pop(name) for name in ("methods", "seeds", "grid") if name in rest}
        return cls(rest, **given)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Study":
        """From a TOML file."""
        return cls.parse(read_toml(path))

    def dump(self) -> dict[str, Any]:
        """A nested dict that `parse` reads."""
        fields = {key: value for key, value in self.base.dump().items() if key not in ("seed", "method")}
        fields |= {"seeds": self.seeds, "methods": list(self.methods)}
        return fields | ({"grid": self.grid} if self.grid else {})

    def fits(self, folder: Path, resume: bool = False) -> bool:
        """Whether a folder can take its runs: it is new, or holds the same study."""
        try:
            self._joined(folder / "study.toml", resume)
        except FedstrideError:
            return False
        return True

    def _joined(self, path: Path, resume: bool) -> dict[str, Any]:
        """The description to store: this study, and what the folder holds of the same experiment already.

        Only a study that goes on may have another end.
        """
        mine = self.dump()
        if not path.exists() or not any(path.parent.glob("*/seed-*/run.json")):
            return mine
        stored = read_toml(path)
        free = {"methods", "seeds", "grid", *(ENDS if resume else ())}
        for key in sorted((stored.keys() | mine.keys()) - free):
            if stored.get(key) != mine.get(key):
                raise FedstrideError(
                    f"{path.parent} holds another study: its {key} is {stored.get(key)!r}, not {mine.get(key)!r}; "
                    f"choose another folder (--out){', or go on with --resume' * (key in ENDS)}"
                )
        grids = [list(one.get("grid", {})) for one in (stored, mine)]
        if set(grids[0]) != set(grids[1]):
            raise FedstrideError(
                f"{path.parent} holds another study: its grid is over {grids[0]}, not {grids[1]}; choose another "
                "folder (--out)"
            )
        old, seeds = stored.get("methods", []), stored.get("seeds", [])
        known = [_entry(method) for method in old]
        mine["methods"] = [*old, *(method for method in mine["methods"] if _entry(method) not in known)]
        for field, values in stored.get("grid", {}).items():
            mine["grid"] |= {field: [*values, *(value for value in mine["grid"][field] if value not in values)]}
        return mine | {"seeds": sorted({*seeds, *mine["seeds"]})}

    def _plans(self) -> Iterator[Planned]:
        for method, *values in itertools.product(self.methods, *self.grid.values()):
            entry, point = _entry(method), dict(zip(self.grid, values))
            if "seed" in entry.changes | point:
                raise FedstrideError("seed cannot stand in set or grid; list the seeds in seeds")
            description = self.base.dump()
            for path, value in (entry.changes | point).items():
                description = override(description, path, value)
            label = entry.label or str(Experiment.parse(description).method)
            # A name made from the method tells its options already.
            rest = [f"{path}={value}" for path, value in point.items() if entry.label or not path.startswith("method")]
            label = " ".join([label, *rest])
            for seed in self.seeds:
                experiment = Experiment.parse(description | {"seed": seed})
                folder = Path(re.sub(r"[^\w.=+, -]", "_", label)) / f"seed-{seed}"
                yield Planned(label, experiment, folder)

    def play(
        self,
        folder: str | os.PathLike,
        resume: bool = False,
        watch: Callable[[Planned, dict[str, Any]], None] = lambda plan, row: None,
        done: Callable[[Planned, Run], None] = lambda plan, run: None,
        workers: int | Pool | None = None,
    ) -> dict[str, list[Run]]:
        """Run what is not there yet; `watch` sees every row as it comes, `done` every run. Returns runs by label.

        Runs that train quicker beside each other do so (fedstride/together.py), the others one after the other.
        Workers take whole runs as long as there is one for each of them; they share the cohorts of the runs left over.
        """
        root = Path(folder)
        seen = set()
        for plan in self.plans:  # mistakes come out before the first run
            key = json.dumps(plan.experiment.dump() | {"seed": 0})
            if key not in seen:
                plan.experiment.prepare()
            seen.add(key)
        whole_study = self._joined(root / "study.toml", resume)
        states = [_state(root / plan.folder, plan.experiment) for plan in self.plans]
        for plan, state in zip(self.plans, states):
            if state == "unfinished" and not resume:
                raise FedstrideError(
                    f"{root / plan.folder} holds an unfinished run; go on with resume (--resume), or choose another"
                )
        _write(root / "study.toml", whole_study)
        missing = [plan for plan, state in zip(self.plans, states) if state != "complete"]
        beside = [] if workers is not None else [plan for plan in missing if able(plan.experiment)]
        found: dict[Path, Run] = {}

        def over(plan: Planned) -> None:
            found[plan.folder] = runs.read(plan.label, plan.experiment.seed, root / plan.folder).run
            done(plan, found[plan.folder])

        def complete(plans: Iterator[Planned], together: Together | None = None, pool: Pool | None = None) -> None:
            for plan in plans:
                if together and together.failed:
                    return
                if plan.folder in found:
                    continue
                if plan in missing:
                    _play(plan.experiment, root / plan.folder, partial(watch, plan), together, pool)
                over(plan)

        def call(plan: Planned) -> tuple:
            return _play, plan.experiment, (root / plan.folder).absolute()

        with hired(workers if missing else None) as pool:
            if len(beside) > 1:
                together, plans = Together(), iter(beside)
                together.play([partial(complete, plans, together)] * several(plan.experiment for plan in beside))
            if pool is not None:
                from fedstride.scale.side import side_by_side  # needs Ray

                whole_runs = _whole_runs(missing, len(pool))
                for plan, _ in side_by_side(pool, root.absolute(), whole_runs, call, watch):
                    over(plan)
            complete(iter(self.plans), pool=pool)
        labels = dict.fromkeys(plan.label for plan in self.plans)
        return {label: [found[plan.folder] for plan in self.plans if plan.label == label] for label in labels}


def _whole_runs(missing: list[Planned], workers: int) -> list[Planned]:
    """Those that one worker does alone: as many as keep all busy, and those whose uploads only one may see."""
    single = [plan for plan in missing if any(getattr(plan.experiment, name) for name in UNSHARED)]
    rest = [plan for plan in missing if plan not in single]
    return single + rest[: max(0, len(rest) - len(missing) % workers)]


def _play(
    experiment: Experiment,
    path: Path,
    progress: Callable[[dict[str, Any]], None],
    together: Together | None = None,
    workers: Pool | None = None,
) -> None:
    """One run, into its folder."""
    _write(path / "experiment.toml", experiment.dump())
    ready = experiment.prepare()
    settings = ready.settings | ({"backend": together} if together else {})
    result = simulate(
        ready.method, ready.model, ready.clients, folder=path, resume=True, progress=progress, workers=workers,
        **settings,
    )  # fmt: skip
    _write(path / "clients.json", facts(result, ready))


def facts(result: Result, prepared: Prepared) -> dict[str, Any]:
    """What everybody holds, and how well the final model does on it: the data of fairness and partition pictures."""
    clients = prepared.clients
    found: dict[str, Any] = {"sizes": clients.sizes.tolist(), "classes": list(prepared.classes)}
    if not prepared.classes:
        return found
    found["counts"] = partition.counts(clients).tolist()
    if not torch.isfinite(result.x).all():
        return found
    device, dtype = result.x.device, result.x.dtype
    model = result.model.to(device, dtype).eval()
    right = []
    with torch.no_grad():
        for rows in clients.order.split(2048):
            outputs = model(clients.inputs[rows].to(device, dtype))
            if outputs.dim() != 2 or outputs.shape[1] < 2:
                return found  # no scores of classes
            right.append((outputs.argmax(1).cpu() == clients.targets[rows]).double())
    sums = np.add.reduceat(torch.cat(right).numpy(), clients.offsets[:-1])
    found["accuracy"] = (sums / clients.sizes).tolist()
    return found


def override(description: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The same description with one field changed, such as `partition.alpha`."""
    first, _, rest = path.partition(".")
    if not rest:
        return description | {first: value}
    inner = description.get(first, {})
    if isinstance(inner, str):  # a name alone is a table with a name
        inner = {"name": inner}
    if not isinstance(inner, dict):
        raise FedstrideError(f"{path} cannot be set: {first} is {inner!r}, which has no fields")
    return description | {first: override(inner, rest, value)}


def parse_override(text: str) -> tuple[str, Any]:
    """`lr=0.1` as a path and a value; values are TOML, and words need no quotes."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise FedstrideError(f"{text!r} is neither a file nor a setting such as rounds=50 or partition.alpha=0.1")
    try:
        return path.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return path.strip(), value.strip()


def listed(text: str) -> list[Any]:
    """`0.1,0.2` as values: one TOML list, or word by word."""
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        return [parse_override(f"value={word}")[1] for word in text.split(",")]


def _state(path: Path, experiment: Experiment) -> str:
    """new, unfinished or complete; a folder with another experiment in it is refused."""
    if not (path / "experiment.toml").exists() or not (path / "run.json").exists():
        return "new"  # before the first checkpoint there is nothing to lose
    try:
        stored, mine = Experiment.load(path / "experiment.toml").dump(), experiment.dump()
    except FedstrideError as error:
        raise FedstrideError(f"{path / 'experiment.toml'} cannot be used: {error}") from None
    for key in sorted(stored.keys() | mine.keys()):
        if stored.get(key) != mine.get(key) and key not in ENDS:
            raise FedstrideError(
                f"{path} holds another experiment: its {key} is {stored.get(key)!r}, not {mine.get(key)!r}; choose "
                "another folder"
            )
    try:
        run = json.loads((path / "run.json").read_text())["run"]
        played = run["round"]
        over = run["status"] in ("stopped", "diverged") or (
            run["status"] == "finished"
            and (played >= mine["rounds"] or run["seconds"] >= mine.get("seconds", float("inf")))
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise FedstrideError(f"{path / 'run.json'} is damaged; delete {path} to run it again") from None
    if played > mine["rounds"]:
        raise FedstrideError(f"{path} holds {played} rounds, more than the {mine['rounds']} asked for")
    return "complete" if over and (path / "clients.json").exists() else "unfinished"


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        text = tomli_w.dumps(content) if path.suffix == ".toml" else json.dumps(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise FedstrideError(f"cannot write {path}: {error.strerror}") from None
    except TypeError as error:
        raise FedstrideError(f"cannot write {path}: {error}") from None


def _entry(method: Any) -> Entry:
    if isinstance(method, Choice):
        method = method.model_dump()
    if isinstance(method, str):
        method = {"name": method}
    if not isinstance(method, dict):
        return Entry("", {"method": method})
    options = {key: value for key, value in method.items() if key not in ("set", "label")}
    changes, label = method.get("set", {}), method.get("label", "")
    if not isinstance(changes, dict) or not isinstance(label, str):
        raise FedstrideError(f"in methods, set must be a table of fields and label a text, not {changes!r}, {label!r}")
    return Entry(label, {"method": options} | changes)


def _seeds(value: Any) -> list[int]:
    if isinstance(value, (list, tuple)):
        seeds = [whole("a seed", seed, 0) for seed in value]
        if not seeds or len(set(seeds)) < len(seeds):
            raise FedstrideError(f"seeds must be different numbers, at least one, not {value!r}")
        return seeds
    return list(range(whole("seeds", value)))
