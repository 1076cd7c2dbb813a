"""The DLSGD paper: delayed local SGD for homogeneous (iid) and heterogeneous (non-iid) data, over virtual seconds.

A hundred clients do 50 steps with batches of ten. A step takes the fastest device 17.0 (31.4) million operations at 10
GFLOPS, other devices up to five times as long; every link has 400 Mbit/s. n updates go into one server update, a round.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedstride.experiment import Experiment
from fedstride.reproduce import Cell, Claim, Found, Item, Order, final, rounds_to, seconds_to

TITLE = "DLSGD: delayed local SGD"

SHARES = (10, 20, 40, 80)  # n of a hundred clients; the cpu scale has a fifth of both
STEPS = {  # Table 1: global and local step size for each n; AsySG has one step size
    "fashion": {
        "Local-SGD": ((1, 0.1), (1, 0.01), (1, 0.01), (1, 0.01)),
        "AsySG": ((1, 0.1), (1, 0.1), (1, 0.1), (1, 0.1)),
        "DLSGD-homo": ((0.1, 0.05), (0.1, 0.05), (0.1, 0.05), (1, 0.1)),
        "Generalized FedAvg": ((0.1, 0.05), (0.1, 0.05), (1, 0.01), (0.1, 0.1)),
        "FedBuff": ((0.1, 0.005), (0.1, 0.01), (0.1, 0.01), (0.1, 0.05)),
        "DLSGD-hetero": ((0.1, 0.05), (0.1, 0.05), (0.1, 0.05), (0.1, 0.05)),
    },
    "cifar": {
        "Local-SGD": ((1, 0.01), (1, 0.01), (1, 0.01), (1, 0.01)),
        "AsySG": ((1, 0.1), (1, 0.1), (1, 0.1), (1, 0.1)),
        "DLSGD-homo": ((1, 0.05), (0.1, 0.01), (0.1, 0.05), (1, 0.01)),
        "Generalized FedAvg": ((1, 0.01), (1, 0.01), (0.1, 0.05), (0.1, 0.05)),
        "FedBuff": ((0.1, 0.01), (0.1, 0.01), (0.1, 0.01), (0.1, 0.05)),
        "DLSGD-hetero": ((0.1, 0.05), (0.1, 0.1), (0.1, 0.05), (0.1, 0.05)),
    },
}
SECONDS = {  # Table 2, for each n
    "fashion": {
        "Local-SGD": (51.89, 179.1, 184.9, 179.83),
        "AsySG": (335.16, 297.57, 231.22, 215.38),
        "DLSGD-homo": (26.39, 49.26, 94.49, 99.72),
        "Generalized FedAvg": (437.57, 447.81, 211.67, 443.56),
        "FedBuff": (198.54, 218.26, 604.93, 422.88),
        "DLSGD-hetero": (103.25, 144.49, 196.98, 236.30),
    },
    "cifar": {
        "Local-SGD": (302.12, 411.64, 282.51, 287.81),
        "AsySG": (501.60, 369.08, 400.92, 345.79),
        "DLSGD-homo": (54.41, 108.52, 207.45, 154.26),
        "Generalized FedAvg": (934.11, 983.46, 1541.2, 1495.0),
        "FedBuff": (394.16, 789.63, 2008.8, 1463.5),
        "DLSGD-hetero": (331.60, 497.51, 684.31, 786.85),
    },
}
RATES = {  # server updates a virtual second at n percent of the fleet, Fashion-MNIST, about
    "Local-SGD": lambda n: 2.0,
    "Generalized FedAvg": lambda n: 2.0,
    "AsySG": lambda n: 2030 / n,
    "DLSGD-homo": lambda n: 383 / n,
    "FedBuff": lambda n: 323 / n,
    "DLSGD-hetero": lambda n: 27 / n**0.5,
}
COLUMNS = {"iid": ("Local-SGD", "AsySG", "DLSGD-homo"), "non-iid": ("Generalized FedAvg", "FedBuff", "DLSGD-hetero")}
TARGETS = {  # printed, and for the cpu scale
    ("fashion", "iid"): (0.9, 0.8),
    ("fashion", "non-iid"): (0.8, 0.7),
    ("cifar", "iid"): (0.7, 0.4),
    ("cifar", "non-iid"): (0.6, 0.28),
}


@dataclass(frozen=True)
class Setting:
    """A data set and how it is dealt out, at a scale."""

    key: str  # of the tables above
    kind: str  # iid or non-iid
    scale: str

    @property
    def full(self) -> bool:
        return self.scale == "full"

    @property
    def title(self) -> str:
        return f"{'Fashion-MNIST' if self.key == 'fashion' else 'CIFAR-10'}, {self.kind}"

    @property
    def target(self) -> float:
        """The accuracy to reach: as printed, or what the small network can reach soon."""
        return TARGETS[self.key, self.kind][not self.full]

    @property
    def dlsgd(self) -> str:
        return COLUMNS[self.kind][-1]

    def count(self, n: int) -> int:
        """Clients for n percent of the fleet."""
        return n if self.full else n // 5

    def row(self, n: int) -> str:
        return f"n = {n}" if self.full else f"n = {self.count(n)} of 20"

    def steps(self, column: str, n: int) -> tuple[float, float]:
        """Table 1, which has .1 and .05 for DLSGD with n = 5 throughout; see `choices` for the exception."""
        if n == 5 or (not self.full and (self.key, column, n) == ("cifar", "DLSGD-homo", 10)):
            return 0.1, 0.05
        return STEPS[self.key][column][SHARES.index(n)]

    def seconds(self, column: str, n: int) -> float:
        """About how long a run may take to the target: the printed time, n = 5 that of n = 10."""
        return SECONDS[self.key][column][SHARES.index(max(n, 10))] if self.full else 10.0

    def budget(self, column: str, n: int) -> float:
        """Virtual seconds after which a run that has not reached the target ends."""
        if self.full:
            return max(100.0, round(2 * self.seconds(column, n)))
        return 40.0 if self.kind == "iid" else 60.0

    def experiment(self, column: str, n: int, lr: float | None = None, **more: Any) -> Experiment:
        """One method at n percent, until the target is reached."""
        (eta, local), count, clients = self.steps(column, n), self.count(n), {"clients": self.count(100)}
        fashion, seconds = self.key == "fashion", self.budget(column, n)
        parameters = {"fashion": (582_026, 50_890), "cifar": (878_538, 197_322)}[self.key][not self.full]
        rate = RATES[column](n) * (1.0 if fashion else 0.56)  # steps and messages take longer
        names = {"Local-SGD": "fedavg", "Generalized FedAvg": "fedavg"}
        method: dict[str, Any] = {"name": names.get(column, column.lower()), "server_lr": eta}
        participation = None
        if method["name"] == "fedavg":
            participation = {"name": "uniform", "n": count, "replacement": column == "Generalized FedAvg"}
        else:
            method["n"] = count
        if column == "AsySG":
            del method["server_lr"]  # its one step size is that of the clients
        fields: dict[str, Any] = dict(
            data="fashion-mnist" if fashion else "cifar-10",
            partition={"name": "iid", **clients} if self.kind == "iid" else {"name": "classes", "k": 2, **clients},
            model="cnn-dlsgd" if self.full else {"name": "mlp", "hidden": 64},
            method=method, participation=participation, weights="uniform", lr=lr or local, steps=50, batch_size=10,
            world={
                "devices": {"name": "slowdown", "base": 1.70e-3 if fashion else 3.14e-3, "low": 1, "high": 5},
                "links": {"name": "bandwidth", "up": round(8 * 4 * parameters / (0.0440 if fashion else 0.0706))},
            },
            seconds=seconds, rounds=math.ceil(3 * rate * seconds),  # more than fit into the seconds
            every=min(max(1, round(rate * self.seconds(column, n) / 100)), 100), stop={"accuracy": self.target},
        )  # fmt: skip
        return Experiment(**fields | more)

    @property
    def choices(self) -> tuple[str, ...]:
        """What every item leaves open."""
        tuned = (
            "Step sizes are the winners printed in Table 1, which the paper tuned over eta in {.1, 1} and eta_l in "
            "{.001, .005, .01, .05, .1}; they are not tuned again."
        )
        if not self.full and (self.key, self.kind) == ("cifar", "iid"):
            tuned += " Except DLSGD-homo with n = 2: at the printed (1, .05) the MLP does not learn, so (.1, .05)."
        common = (
            tuned,
            "The channels of the network are not stated: 32 and 64, by its latent size, bytes and operations.",
            "Preparation of images is not stated: pixels are scaled by MNIST's mean and deviation, or by CIFAR-10's. "
            "Batches are drawn anew for every step.",
            "The slow-down is drawn once a client, continuously. The printed operations of a step are taken as they "
            "are, although they are those of one image, not of ten.",
            "The bandwidth is set so that a message takes 44.0 ms (Fashion-MNIST) or 70.6 ms (CIFAR-10), the printed "
            "size over 400 Mbit/s; a vector of the model has a slightly other size. Links do not share capacity.",
            "The start of the network is not stated: torch's, by the seed of the run.",
            "Accuracy is measured at some server updates only, so the target is met up to that many updates late.",
        )
        if self.kind == "iid":
            return (*common, "All clients have equal shares.")
        return (
            *common,
            "Two random classes a client: every class has as many owners, everybody as many images.",
            "DLSGD-hetero divides by n and counts a client as often as it was drawn; what was sent leaves its buffer.",
        )

    @property
    def reduced(self) -> str:
        """What the cpu scale leaves out."""
        if self.full:
            return ""
        return (
            "20 clients instead of 100 with the same shares in a server update (so that updates are as frequent and as "
            f"stale), an MLP with 64 hidden units instead of the CNN, target {100 * self.target:g} %; steps and "
            "messages take the paper's time."
        )


# ---------------------------------------------------------------------------------------------- Table 2


def _less(found: Found, measure, one: tuple[str, str], two: tuple[str, str]) -> bool | None:
    """Whether the first cell has the smaller number; None if one has not run, or both failed."""
    gain = found.middle(*two, measure) - found.middle(*one, measure)
    return None if math.isnan(gain) else gain > 0


def table2(scale: str, key: str, kind: str) -> Item:
    """Three methods, four sizes of a server update."""
    setting = Setting(key, kind, scale)
    seconds, rounds = seconds_to(setting.target), rounds_to(setting.target)
    more = (scale, key, kind) == ("full", "fashion", "iid")  # cheap enough to see whether AsySG's step is the trouble
    cells, orders = [], []
    for index, n in enumerate(SHARES):
        row, printed = setting.row(n), {column: SECONDS[key][column][index] for column in COLUMNS[kind]}
        for column in COLUMNS[kind]:
            numbers = {seconds.name: printed[column]} if setting.full else {}
            cells.append(Cell(row, column, setting.experiment(column, n), numbers))
        if more:
            cells.append(Cell(row, "AsySG, step .01", setting.experiment("AsySG", n, lr=0.01)))
        if not setting.full:
            ranked = sorted(printed, key=printed.__getitem__)
            orders += [Order(row, one, two) for i, one in enumerate(ranked) for two in ranked[i + 1 :]]
    few, many = (setting.row(10), setting.dlsgd), (setting.row(80), setting.dlsgd)
    baselines = {
        "iid": (
            "Local-SGD draws its n clients without replacement.",
            "AsySG takes the mean of n gradients, one an upload. They are about "
            f"{setting.count(190)} / n server updates old, at the printed step .1 perhaps too old to learn.",
            *(("Added: AsySG with a step of .01.",) if more else ()),
        ),
        "non-iid": (
            "FedBuff has all clients at work and does not weight by staleness.",
            "Generalized FedAvg draws with replacement.",
        ),
    }[kind]
    limit = f"{setting.budget(setting.dlsgd, 10):g} seconds"
    ends = "twice the printed seconds (at least 100)" if setting.full else limit
    return Item(
        f"Table 2 and Figures 1, 3-5, {setting.title}",
        "DLSGD reaches the target first for every n.",
        tuple(cells), (seconds, rounds),
        choices=(*setting.choices, *baselines, f"A run ends at the target or after {ends}."),
        reduced=setting.reduced, orders=tuple(orders), curve=("accuracy", "seconds"),
        claims=(
            Claim("DLSGD takes fewer seconds with the smallest n than with the largest",
                  lambda found: _less(found, seconds, few, many)),
            Claim("DLSGD takes fewer rounds with the largest n than with the smallest",
                  lambda found: _less(found, rounds, many, few)),
        ),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- DLSGD alone


def figure2(scale: str, kind: str) -> Item:
    """DLSGD with different n, over rounds."""
    setting = Setting("fashion", kind, scale)
    shares = (5, *SHARES)
    cells = [Cell(setting.dlsgd, setting.row(n), setting.experiment(setting.dlsgd, n)) for n in shares]
    return Item(
        f"Figure 2, {setting.title}", "Over rounds, DLSGD is the faster the larger n.", tuple(cells),
        (rounds_to(setting.target), seconds_to(setting.target)), reduced=setting.reduced,
        orders=tuple(Order(setting.dlsgd, setting.row(b), setting.row(a)) for a, b in zip(shares, shares[1:])),
        choices=(*setting.choices, "The n shown are taken to be those of Table 1, each with its own step sizes."),
    )  # fmt: skip


def figure6(scale: str, key: str, kind: str) -> Item:
    """DLSGD with different numbers of local steps."""
    setting, counts = Setting(key, kind, scale), (20, 50, 100)
    rounds = 3000 if setting.full else {("cifar", "iid"): 200, ("cifar", "non-iid"): 120}.get((key, kind), 300)
    more: dict[str, Any] = {"rounds": rounds, "seconds": None, "every": max(1, rounds // 150)}
    if key == "cifar":
        more["stop"] = None  # the paper compares the accuracies at the end, too
    row, end = f"{setting.dlsgd}, {setting.row(10)}", final(last=5)
    cells = [Cell(row, f"K = {k}", setting.experiment(setting.dlsgd, 10, steps=k, **more)) for k in counts]
    lower = Claim("at the end the accuracy is lower with K = 100 than with K = 50",
                  lambda found: _less(found, end, (row, "K = 100"), (row, "K = 50")))  # fmt: skip
    return Item(
        f"Figure 6, {setting.title}",
        "Over rounds, DLSGD is the faster the larger K" + ("; with K = 100 it ends lower." if key == "cifar" else "."),
        tuple(cells), (rounds_to(setting.target), end if key == "cifar" else seconds_to(setting.target)),
        orders=tuple(Order(row, f"K = {b}", f"K = {a}") for a, b in zip(counts, counts[1:])),
        claims=(lower,) if key == "cifar" else (), reduced=setting.reduced,
        choices=(*setting.choices, "Every K has the step sizes that are printed for K = 50.",
                 f"Rounds are not stated: {rounds}{'' if key == 'cifar' else ', or until the target'}."),
    )  # fmt: skip


ITEMS = {}
for _key in ("fashion", "cifar"):
    for _kind in ("iid", "non-iid"):
        ITEMS[f"table2-{_key}-{_kind.replace('-', '')}"] = partial(table2, key=_key, kind=_kind)
for _kind in ("iid", "non-iid"):
    ITEMS[f"figure2-{_kind.replace('-', '')}"] = partial(figure2, kind=_kind)
for _key in ("fashion", "cifar"):
    for _kind in ("iid", "non-iid"):
        ITEMS[f"figure6-{_key}-{_kind.replace('-', '')}"] = partial(figure6, key=_key, kind=_kind)
