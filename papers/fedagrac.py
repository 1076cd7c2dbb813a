"""The FedaGrac paper: step asynchronism (clients that do different numbers of local steps) on heterogeneous data.

DP1 deals every class out by Dirichlet(0.3), DP2 gives every client five classes; V is the variance of the numbers of
steps. Fashion-MNIST has 10 clients in this paper, CIFAR-10 and a9a have 20.
"""

import math
from functools import partial
from typing import Any

from fedstride.data.files import CONSTANTS
from fedstride.experiment import Experiment
from fedstride.reproduce import Cell, Claim, Found, Item, Order, final, rounds_to

TITLE = "FedaGrac: calibration against step asynchronism"
DP1 = {"name": "dirichlet", "alpha": 0.3, "balance": True}
DP2 = {"name": "classes", "k": 5}
BLACK = [-mean / std for mean, std in zip(*CONSTANTS["cifar-10"])]  # the official code crops before it normalises

START = "The references start at zero, as in the official code, not with a pass over all data as in Algorithm 1."
BATCHES = "Batches are drawn with replacement; the official code goes through the data in one fixed order."
BALANCE = (
    "DP1 has the balance rule of the official code: who already holds an equal share of all data gets none of the "
    "later classes, and the draw is repeated until everybody has ten examples (there as many as classes: two on a9a)."
)
FASHION = (
    "The batch is not stated for Fashion-MNIST: 25, as for CIFAR-10.",
    "The heterogeneous partition is not stated: DP1.", BALANCE, BATCHES,
    "Pixels are scaled by MNIST's mean and deviation, as in the official code; networks start as torch has it.",
)  # fmt: skip
EVENLY = (
    "The asynchronous numbers of steps ('at least 100') are not stated: evenly from 100 to 400, because the printed "
    "speed-up of the CNN on iid data, 20 rounds to 8, needs 2.5 times the steps."
)


def _agrac(calibration: Any, mode: str = "std") -> dict[str, Any]:
    return {"name": "fedagrac", "calibration": calibration, "mode": mode, "start": "zeros"}


def _five(calibration: float) -> dict[str, Any]:
    """The compared methods, in the order of the paper's table."""
    return {
        "FedaGrac": _agrac(calibration), "FedAvg": "fedavg", "FedNova": "fednova", "SCAFFOLD": "scaffold",
        "FedProx": {"name": "fedprox", "mu": 0.01},
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- Fashion-MNIST

LR, CNN = "logistic", "cnn-fedagrac"


def _fashion(
    model: str, method: Any, steps: Any, rounds: int, iid: bool = False, batch: int = 25, **more: Any
) -> Experiment:
    return Experiment(
        data="fashion-mnist", partition={"name": "iid", "clients": 10} if iid else {**DP1, "clients": 10}, model=model,
        method=method, steps=steps, rounds=rounds, lr=0.03 if model == CNN else 0.001, batch_size=batch, weights="data",
        **more,
    )  # fmt: skip


def _spread(lowest: int) -> tuple[int, ...]:
    """Asynchronous steps: ten numbers from the lowest to four times as many."""
    return tuple(round(lowest * (1 + i / 3)) for i in range(10))


def _table1(scale: str, model: str, printed: tuple[float, ...], target: float, rounds: int, seeds: int) -> Item:
    """FedAvg slows down where both kinds of heterogeneity meet; target, rounds, seeds: those of the cpu scale."""
    if scale == "full":
        target, rounds, seeds = 0.8, 1000, 3
    batch, row = 10 if model == CNN and scale == "cpu" else 25, "LR" if model == LR else "CNN"
    even, uneven, same = 100, _spread(100), target == 0.8
    columns = {"neither": (even, True), "steps": (uneven, True), "data": (even, False), "both": (uneven, False)}
    cells = [
        Cell(
            row, column, _fashion(model, "fedavg", steps, rounds, iid, batch, stop={"accuracy": target}),
            {"rounds to 80 %": number} if same else {},
        )
        for (column, (steps, iid)), number in zip(columns.items(), printed)
    ]  # fmt: skip
    ranked = [column for _, column in sorted(zip(printed, columns))]
    reduced = f"{rounds} rounds instead of 1000" + ("" if same else f", to {100 * target:g} %, batch 10, one seed")
    return Item(
        f"Table 1, {row}", "Different numbers of steps help FedAvg on iid data and hurt it on heterogeneous data.",
        tuple(cells), (rounds_to(target),), seeds=seeds,
        orders=() if same else tuple(Order(row, *pair) for pair in zip(ranked, ranked[1:])),
        choices=(
            *FASHION, EVENLY,
            *(["The printed 2 may have lost a digit: 200 steps of 0.001 are far from 80 %."] if model == LR else []),
        ),
        reduced="" if scale == "full" else f"At most {reduced}.",
    )  # fmt: skip


# Peak single-precision rates as the makers give them, operations a second. Only their ratios matter.
FASTEST = 34.1e12  # RTX 3080 Ti
PEAK = {"GTX 2080 Ti": 13.4e12, "GTX 1080 Ti": 11.3e12, "Jetson Nano": 236e9, "Raspberry Pi 4": 48e9}
SLOW_STEPS = 5  # of the nine in a round
OPERATIONS = 2.9e6  # of the CNN for one image, forward and backward


def _devices(method: Any, others: str, share: float, batch: int, **more: Any) -> Experiment:
    """A round ends when the nine have done their steps; the RTX 3080 Ti does what its share allows until then."""
    fast, slow = share * FASTEST, PEAK[others]
    devices = {"name": "flops", "per_step": batch * OPERATIONS, "speed": [fast, *[slow] * 9]}
    steps = (int(SLOW_STEPS * fast / slow), *[SLOW_STEPS] * 9)
    return _fashion(CNN, method, steps, batch=batch, world={"devices": devices}, **more)


def _table2(scale: str, printed: dict[str, tuple], shares: tuple[int, ...], rounds: int) -> Item:
    """Printed: share, rounds, accuracy of FedNova, then of FedaGrac; shares, rounds: those of the cpu scale."""
    small = scale == "cpu" and rounds < 100
    more = {"rounds": rounds, "batch": 10, "stop": {"accuracy": 0.6}} if small else {"rounds": 100, "batch": 25}
    cells, claims, orders, within = [], [], [], min(50, more["rounds"])
    for others, both in printed.items():
        for share in shares if small or shares == (100,) else (25, 50, 75, 100):
            row = f"{others}, {share} %"
            for name, method, (most, reach, accuracy) in zip(("FedNova", "FedaGrac"), ("fednova", _agrac(0.05)), both):
                numbers = {"rounds to 60 %": reach} | ({} if small else {"accuracy %": accuracy})
                cells.append(
                    Cell(row, name, _devices(method, others, share / 100, **more), numbers if share == most else {})
                )
                does = share <= most
                if within >= reach or not does:  # fewer rounds than the paper's cannot show that it does
                    text = f"{name} beside {row}: 60 % {'' if does else 'not '}within {within} rounds"
                    reaches = partial(_reaches, row=row, name=name, within=within, does=does)
                    claims.append(Claim(text, reaches, ours=share < most))  # the paper lowers the share until it does
            if share == 100 > both[0][0]:
                orders.append(Order(row, "FedaGrac", "FedNova"))
    return Item(
        f"Table 2, {' and '.join(printed)}", "FedaGrac can use all of a fast device beside slow ones, FedNova cannot.",
        tuple(cells), (rounds_to(0.6),) if small else (rounds_to(0.6), final()),
        seeds=3 if scale == "full" else 1, claims=tuple(claims), orders=tuple(orders),
        choices=(
            *FASHION, START,
            "Speeds are not stated: steps a second in proportion to peak single-precision rates, 34.1 (RTX 3080 Ti), "
            "13.4 (2080 Ti), 11.3 (1080 Ti), 0.236 (Jetson Nano), 0.048 TFLOPS (Raspberry Pi 4: four cores, 1.5 GHz, "
            "eight operations a cycle).",
            f"The deadline of a round is not stated: the nine slower devices do {SLOW_STEPS} steps until then, with "
            "which the row of the 2080 Ti reaches 60 % in a trial after 20 to 25 rounds (printed: 29 and 36).",
            "The paper lowers the share by 5 % at a time; 25, 50, 75 and 100 % are taken, only 100 % where both do it.",
            "The calibration rate is not stated: 0.05, the best of the paper's networks.",
        ),
        reduced=f"{rounds} rounds instead of 100, ended at 60 %; batch 10 instead of 25, two shares." if small else "",
    )  # fmt: skip


def _reaches(found: Found, row: str, name: str, within: int, does: bool) -> bool | None:
    values = found.values(row, name).values()
    return all((value <= within) == does for value in values) if values else None


def _figure2(scale: str, title: str, claim: str, row: str, rates: dict[str, Any], rounds: int, **more: Any) -> Item:
    """Calibration rates; the numbers of steps are constant or various."""
    full = scale == "full"
    least, own = (100, {}) if full else (20, {"batch": 10, "every": 2})
    steps = _spread(least) if row == "various" else least
    cells = [Cell(row, name, _fashion(CNN, _agrac(rate), steps, rounds, **own)) for name, rate in rates.items()]
    open_points = (START, *FASHION, "The mean of the last ten rounds is shown.", *more.pop("choices"))
    return Item(
        title, claim, tuple(cells), (final(last=10 if full else 5),), seeds=3 if full else 1, choices=open_points,
        reduced="" if full else f"{rounds} rounds instead of 200, a fifth of the steps, batch 10, one seed.", **more,
    )  # fmt: skip


def figure2a(scale: str) -> Item:
    """The calibration rate under asynchronous steps."""
    rates = {f"lambda = {rate:g}": rate for rate in (0, 0.01, 0.05, 0.1, 0.5, 1)}

    return _figure2(
        scale, "Figure 2a", "With asynchronous steps the accuracy depends on the calibration rate.", "various", rates,
        200 if scale == "full" else 30, choices=(EVENLY, "The rates are not stated: those of the columns."),
    )  # fmt: skip


def figure2b(scale: str) -> Item:
    """A constant calibration rate, or one that grows."""
    rounds = 200 if scale == "full" else 60
    stages = [[1, 0.1], [rounds // 4 + 1, 0.5], [3 * rounds // 4 + 1, 1.0]]  # 0.1 for 50 rounds, 0.5 for 100, then 1
    rates = {f"lambda = {rate:g}": rate for rate in (0, 0.1, 0.5, 1)} | {"increase": stages}
    return _figure2(
        scale, "Figure 2b", "With constant steps, a rate that grows from 0.1 to 1 is set beside constant ones.",
        "constant", rates, rounds,
        choices=("Steps and rounds are not stated: 100 as in Table 1, 200 as in figure 2a; stages in proportion.",
                 "The constant rates are the stages of the growing one; 0, which is FedAvg, is added."),
    )  # fmt: skip


def _figure3(scale: str, name: str, model: str, calibration: float) -> Item:
    """Which reference a client sends."""
    full = scale == "full"
    few, batch = (20, 10) if not full and model == CNN else (100, 25)
    rounds = 200 if full else 60 if model == LR else 30
    modes = {"FedaGrac": "std", "avg": "avg", "first": "first", "reverse": "reverse"}
    cells = [
        Cell(row, column, _fashion(model, _agrac(calibration, mode), steps, rounds, batch=batch))
        for row, steps in (("constant", few), ("various", _spread(few)))
        for column, mode in modes.items()
    ]
    smaller = f"{rounds} rounds instead of 200"
    smaller += ", a fifth of the steps, batch 10, one seed." if model == CNN else "."
    return Item(
        f"Figure 3, {name}", "FedaGrac's choice of references is the best of four where the numbers of steps differ.",
        tuple(cells), (final(last=10),), seeds=3 if full else 2 if model == LR else 1,
        orders=tuple(Order("various", "FedaGrac", other) for other in ("avg", "first", "reverse")),
        choices=(
            *FASHION, EVENLY, START, "Rounds are not stated: 200, and the last ten are averaged.",
            f"The calibration rate is not stated: {calibration:g}, the best of figure 4 for this kind of model.",
            "With constant steps nobody is fast, so FedaGrac is 'avg' and 'reverse' is 'first', step for step.",
        ),
        reduced="" if full else smaller,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- a9a


def _a9a(method: Any, mean: float, variance: float, rounds: int, lr: float) -> Experiment:
    return Experiment(
        data="a9a", partition={**DP1, "clients": 20}, model=LR, method=method, lr=lr, rounds=rounds,
        steps={"name": "gaussian", "mean": mean, "variance": variance}, batch_size=20, weights="data",
    )  # fmt: skip


def _peak(found: Found, row: str, lrs: tuple[float, ...], calibration: float) -> bool | None:
    """Whether the best point of the grid is where the paper has it."""
    cells = [cell for cell in found.item.cells if cell.row.startswith(row)]
    if not all(found.best(cell) for cell in cells):
        return None
    top = max(cells, key=lambda cell: found.middle(cell.row, cell.column)).experiment
    return top.lr in lrs and top.method.options["calibration"] == calibration


def _figure4(title: str, make: Any, rates: tuple[float, ...], variances: tuple[int, ...], best: tuple, **more) -> Item:
    """The grid itself is what the figure shows, so its points are cells. Best: learning rates, calibration rate."""
    cells = [
        Cell(f"V = {variance}, eta = {eta:g}", f"lambda = {rate:g}", make(_agrac(rate), variance=variance, lr=eta))
        for variance in variances
        for eta in (0.05, 0.01, 0.005, 0.001)
        for rate in rates
    ]
    lrs, rate = best
    where = f"eta = {' or '.join(f'{eta:g}' for eta in lrs)}, lambda = {rate:g}"
    claims = [
        Claim(f"V = {variance}: best at {where}", partial(_peak, row=f"V = {variance},", lrs=lrs, calibration=rate))
        for variance in variances
    ]
    return Item(title, f"The best accuracy is at {where}.", tuple(cells), claims=tuple(claims), **more)


GRID = (
    "The rates of the grid are not all stated: eta 0.05, 0.01, 0.005, 0.001, and lambda as in the columns.",
    "The mode of the steps is not stated: fixed.", BALANCE, BATCHES, START,
)  # fmt: skip


def figure4_a9a(scale: str) -> Item:
    """Learning rate and calibration rate, logistic regression."""
    full = scale == "full"
    rates = (0.01, 0.05, 0.1, 0.5, 1) if full else (0.1, 0.5, 1)
    return _figure4(
        "Figure 4, a9a", partial(_a9a, mean=500, rounds=100 if full else 20), rates, (0, 10000), ((0.005,), 1),
        measures=(final(last=10),), seeds=3 if full else 1, choices=GRID,
        reduced="" if full else "20 rounds instead of 100, lambda from 0.1.",
    )  # fmt: skip


MEANS = (100, 500)
PANELS = (
    "The means of the two panels are not in the text: 100 and 500.",
    "The paper's axis is the time of the authors' machine; here it is rounds, and the last ten are averaged.",
    "SCAFFOLD takes option II and a server step of 1.",
)


def figure5_a9a(scale: str) -> Item:
    """Five methods, logistic regression."""
    full = scale == "full"
    cells = [
        Cell(
            f"mean {mean}", name, _a9a(method, mean, 10000, 200 if full else 40, 0.005),
            grid={"lr": (0.005, 0.001, 0.0005)} if full else {},
        )
        for mean in MEANS
        for name, method in _five(1.0).items()
    ]  # fmt: skip
    pairs = [(better, worse) for better in ("FedaGrac", "SCAFFOLD") for worse in ("FedAvg", "FedNova", "FedProx")]
    return Item(
        "Figure 5, a9a", "FedaGrac and SCAFFOLD end far above FedAvg, FedNova and FedProx.", tuple(cells),
        (final(last=10),), seeds=3 if full else 2,
        orders=tuple(Order(f"mean {mean}", *pair) for mean in MEANS for pair in pairs),
        choices=(
            *PANELS, "FedaGrac's lambda is 1, the best of figure 4; FedProx's mu is not stated for this figure: 0.01.",
            "Learning rates are tuned for the same number that is shown.", BALANCE, BATCHES, START,
        ),
        reduced="" if full else "40 rounds instead of 200, one learning rate (0.005).",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- CIFAR-10


def _smaller(network: str, rest: str, data: str = "Fashion-MNIST") -> str:
    return (
        f"The two-layer CNN on {data} with 10 clients and batch 10 instead of {network} on CIFAR-10 with 20 and 25, no "
        f"crops; a tenth of the steps and of their standard deviation; {rest}."
    )


CIFAR = (
    "Images are cropped (4 black pixels around) and mirrored, as in the official code.", BATCHES, START,
    "Networks start as torch has it; SCAFFOLD takes option II and a server step of 1.", "One seed.",
)  # fmt: skip
SINGLE = (
    "One point for all rows, lr 0.01, lambda 0.05 and FedProx's mu 0.01, because a row takes many GPU minutes; the "
    "paper takes the best of lr 0.01, 0.008, 0.005, lambda 0.01 to 0.05 and mu 1, 0.1, 0.01."
)


def _cifar(
    method: Any, scale: str, partition: dict[str, Any], variance: int, rounds: int, model: str = "alexnet-fedagrac",
    mean: int = 500, redraw: bool = False, lr: float = 0.01, data: str = "fashion-mnist", **more: Any,
) -> Experiment:  # fmt: skip
    """The paper's network on CIFAR-10; at the cpu scale its smallest one on `data`, and a tenth of the steps."""
    full = scale == "full"
    own: dict[str, Any] = {"data": data, "model": CNN}
    if full:
        own = {"data": "cifar-10", "model": model, "augment": {"name": "crop-flip", "padding": 4, "fill": BLACK}}
    steps = {"mean": mean, "variance": variance} if full else {"mean": mean / 10, "variance": variance / 100}
    return Experiment(
        **own, partition={**partition, "clients": 20 if full else 10}, method=method, lr=lr, rounds=rounds,
        steps={"name": "gaussian", **steps, "redraw": redraw}, batch_size=25 if full else 10, weights="data", **more,
    )  # fmt: skip


def figure4_alexnet(scale: str) -> Item:
    """Learning rate and calibration rate, AlexNet."""
    full = scale == "full"
    make = partial(_cifar, scale=scale, partition=DP1, rounds=100 if full else 15)
    return _figure4(
        "Figure 4, AlexNet", make, (0.01, 0.05, 0.1, 1) if full else (0.01, 0.05, 1), (0, 10000) if full else (10000,),
        ((0.01, 0.05), 0.05), measures=(final(last=10 if full else 5),), seeds=1,
        choices=("One seed.", *GRID, CIFAR[0]),
        reduced="" if full else _smaller("AlexNet", "15 rounds instead of 100, V = 10000 only, three lambda"),
    )  # fmt: skip


def figure5_alexnet(scale: str) -> Item:
    """Five methods, AlexNet."""
    full = scale == "full"
    more: dict[str, Any] = {"rounds": 200} if full else {"rounds": 30, "lr": 0.03, "every": 2}
    cells = [
        Cell(f"mean {mean}", name, _cifar(method, scale, DP2, 10000, mean=mean, **more))
        for mean in MEANS
        for name, method in _five(0.05).items()
    ]
    return Item(
        "Figure 5, AlexNet", "FedaGrac learns as fast as the best of the others or faster; no numbers are given.",
        tuple(cells), (final(last=10 if full else 5),), seeds=1, choices=(*PANELS, SINGLE, *CIFAR),
        reduced="" if full else _smaller("AlexNet", "30 rounds instead of 200, lr 0.03"),
    )  # fmt: skip


ROWS = {
    "V = 0": (0, False), "V = 100, fixed": (100, False), "V = 100, random": (100, True),
    "V = 10000, fixed": (10000, False), "V = 10000, random": (10000, True),
}  # fmt: skip
NEVER = math.inf  # printed as 200+
ALEXNET_DP1 = (  # rounds of FedaGrac, FedAvg, FedNova, SCAFFOLD, FedProx
    (113, 123, 127, 113, 145), (106, 130, 147, 114, 144), (116, 140, 154, 133, 140), (126, 156, 172, 141, 142),
    (121, 177, 170, 136, 152),
)  # fmt: skip
ALEXNET_DP2 = (
    (152, 183, 186, 160, 147), (111, 179, 119, 124, 143), (112, NEVER, 195, 137, 141), (111, NEVER, 113, 131, 145),
    (118, NEVER, NEVER, 123, 152),
)  # fmt: skip
VGG_DP2 = (
    (73, 83, 79, 72, 90), (73, 75, 72, 66, 72), (73, 85, 74, 78, 102), (77, 73, 70, 72, 77), (71, 85, 76, 72, 99),
)  # fmt: skip


def _table6(scale: str, network: str, partition: dict[str, Any], printed: tuple, target: float) -> Item:
    """Rounds to a target. The cpu scale has another network, so another target and the orders of FedaGrac alone."""
    full, vgg = scale == "full", network == "VGG-19"
    where = "where steps are drawn anew every round" if vgg else "in all rows, or nearly all"
    more: dict[str, Any] = {"model": "vgg19-fedagrac"} if vgg else {}
    goal, rounds, rows = target, 200, list(ROWS)
    if not full:
        goal, rounds, rows = (0.35, 20, rows[-1:]) if vgg else (0.65, 30, rows[-2:])
        more = {"lr": 0.03, "data": "cifar-10" if vgg else "fashion-mnist"}
    cells, orders = [], []
    for row, numbers in zip(ROWS, printed):
        variance, redraw = ROWS[row]
        for (name, method), number in zip(_five(0.05).items(), numbers) if row in rows else ():
            made = _cifar(method, scale, partition, variance, rounds, redraw=redraw, stop={"accuracy": goal}, **more)
            cells.append(Cell(row, name, made, {f"rounds to {100 * target:g} %": number} if full else {}))
            if number != numbers[0]:
                orders.append(Order(row, *(("FedaGrac", name) if numbers[0] < number else (name, "FedaGrac"))))
    rest = f"{' and '.join(rows)} only, at most {rounds} rounds to {100 * goal:g} %, lr 0.03"
    return Item(
        f"Table 6, {network}, {'DP1' if partition is DP1 else 'DP2'}",
        f"FedaGrac needs the fewest rounds {where}.",
        tuple(cells), (rounds_to(goal),), seeds=1, orders=() if full else tuple(orders),
        choices=(SINGLE, *([BALANCE] if partition is DP1 else []), *CIFAR),
        reduced="" if full else _smaller(network, rest, "CIFAR-10" if vgg else "Fashion-MNIST"),
    )  # fmt: skip


PI = {"Raspberry Pi 4": ((25, 49, 66.18), (100, 25, 72.07))}
NANO = {"Jetson Nano": ((50, 50, 64.39), (100, 21, 72.93))}
GPUS = {
    "GTX 1080 Ti": ((100, 40, 69.77), (100, 30, 72.00)), "GTX 2080 Ti": ((100, 29, 72.11), (100, 36, 72.13)),
}  # fmt: skip
ITEMS = {
    "table1-lr": partial(_table1, model=LR, printed=(2, 1, 91, math.inf), target=0.8, rounds=200, seeds=2),
    "table1-cnn": partial(_table1, model=CNN, printed=(20, 8, 265, 339), target=0.7, rounds=25, seeds=1),
    "table2-pi": partial(_table2, printed=PI, shares=(25, 100), rounds=20),
    "table2-nano": partial(_table2, printed=NANO, shares=(50, 100), rounds=50),
    "table2-gpus": partial(_table2, printed=GPUS, shares=(100,), rounds=100),
    "figure2a": figure2a, "figure2b": figure2b,
    "figure3-lr": partial(_figure3, name="LR", model=LR, calibration=1.0),
    "figure3-cnn": partial(_figure3, name="CNN", model=CNN, calibration=0.05),
    "figure4-a9a": figure4_a9a, "figure4-alexnet": figure4_alexnet,
    "figure5-a9a": figure5_a9a, "figure5-alexnet": figure5_alexnet,
    "table6-alexnet-dp1": partial(_table6, network="AlexNet", partition=DP1, printed=ALEXNET_DP1, target=0.68),
    "table6-alexnet-dp2": partial(_table6, network="AlexNet", partition=DP2, printed=ALEXNET_DP2, target=0.7),
    "table6-vgg-dp2": partial(_table6, network="VGG-19", partition=DP2, printed=VGG_DP2, target=0.8),
}  # fmt: skip
