"""FedVeca: the server adapts every client's number of local steps.

Fair comparison: where FedVeca hands out tau_all steps in K rounds, clients of FedAvg, FedNova, FedProx and SCAFFOLD do
tau_i = floor((tau_all / K) p_i) in every round, p_i their share of the data, and centralised SGD does tau_all over the
run. These numbers follow from the FedVeca run of the same seed.
"""

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fedstride.experiment import Experiment
from fedstride.reproduce import Cell, Claim, Found, Item, Measure, Order, final
from fedstride.statistics import Run

TITLE = "FedVeca: vectorised averaging with adaptive numbers of local steps"

BASELINES: dict[str, Any] = {
    "FedAvg": "fedavg", "FedNova": "fednova", "FedProx": {"name": "fedprox", "mu": 1.0}, "SCAFFOLD": "scaffold",
}  # fmt: skip
LEVEL = 0.25  # of the SVM's loss: all methods of Table I end below
RUNS = 10

BASIC = (
    "The batch is not stated: 32, drawn with replacement.",
    "The first number of steps is not stated: 2 for everybody.",
    "Clients send the gradient over all their data for grad F_i(x_k).",
    "delta is taken from Algorithm 2, line 17, with grad F(x_{k-1}); Assumption 4 sums one term less and has x_k.",
)
OWN = (
    *BASIC,
    "The roll-back of Algorithm 1 is off: with it runs stall far from Table I, without it the SVM's row is met.",
)
SVM = (
    "Regulariser and start of the SVM are not stated: 0.05 |w|^2, which the losses contain, and zero.",
    "How pixels of the SVM are scaled is not stated: to [0, 1].",
    "With a start at zero the first estimate of L is 0/0 and is left out.",
)
FAIR = (
    "FedProx's mu is not stated: 1.",
    "SCAFFOLD's control variates are not stated: the mean of the round's gradients (option II), server step 1.",
    "A baseline's client does at least one step; centralised SGD does tau_all / K steps a round, to the nearest.",
)
NETWORK = (
    "Whether images were standardised is not stated: they are, by mean and standard deviation.",
    "The start of the network is not stated: torch's own, and no normalisation layers.",
)
CIFAR = "The paper prints 1568 inputs of the dense layer for both data sets; CIFAR-10 has 2048."


# ---------------------------------------------------------------------------------------------- measures


def _objective(row: dict[str, Any], experiment: Experiment) -> dict[str, float]:
    """The test loss with the regulariser, as in the paper, and one name for accuracies."""
    if "loss" not in row:
        return {}
    accuracy = row["accuracy"] if "accuracy" in row else row["parity_accuracy"]
    return {"objective": row["loss"] + row.get("penalty", 0.0), "accuracy": accuracy}


def _arrives(run: Run) -> float:
    return next((row["round"] for row in run.rows if row.get("objective", math.inf) <= LEVEL), math.inf)


def _rough(run: Run) -> float:
    values = [row["objective"] for row in run.rows if "objective" in row]
    return 100 * float(np.abs(np.diff(values[(len(values) - 1) // 2 :])).mean())


def _premises(run: Run, first: int) -> list[tuple[int, float]]:
    return [(row["round"], row["premise"]) for row in run.rows if row["round"] >= first and "premise" in row]


LOSS = replace(final("objective"), name="loss x 100", lower=True)
ACCURACY = final("accuracy")
ARRIVES = Measure(f"rounds to loss {LEVEL:g}", _arrives, unit="rounds")
ROUGH = Measure("change of loss x 100 a round, second half", _rough, places=2)
# From the second round on: one point alone says nothing about L.
BELOW = Measure("last round below 1", lambda run: max((t for t, value in _premises(run, 2) if value < 1), default=0))
LEAST = Measure("least after round 10", lambda run: min((v for _, v in _premises(run, 11)), default=math.nan), False, 2)
ROLLED = Measure("rounds rolled back", lambda run: sum(row.get("rollbacks", 0) > 0 for row in run.rows))
STREAK = Measure("longest row of roll-backs", lambda run: run.rows[-1].get("longest_rollback", 0))


def _all(found: Found, rows: list[str], measure: Measure) -> list[float]:
    """FedVeca's numbers in some rows, over all seeds."""
    return [value for row in rows for value in found.values(row, "FedVeca", measure).values()]


# ---------------------------------------------------------------------------------------------- experiments


def _svm(method: Any, rounds: int = 100, clients: int = 5, case: int = 3) -> Experiment:
    return Experiment(
        data={"name": "mnist", "normalise": False}, partition={"name": "fedveca", "clients": clients, "case": case},
        model="svm-fedveca", loss="parity_hinge", weight_decay=0.1, metrics=["parity_accuracy"],
        method=method, rounds=rounds, lr=0.01, batch_size=32,
    )  # fmt: skip


def _network(method: Any, data: str, scale: str) -> Experiment:
    rounds = 50 if scale == "cpu" and data == "cifar-10" else 100
    return Experiment(
        data=data, partition={"name": "fedveca", "clients": 5, "case": 3}, method=method, rounds=rounds, lr=0.01,
        model="cnn-fedveca" if scale == "full" else "mlp", batch_size=32,
    )  # fmt: skip


def _reduced(scale: str, rounds: str = "") -> str:
    """Of items with networks."""
    small = "one hidden layer of 64 units instead of the CNN (a pass over all data a round is too slow without a GPU)"
    return "3 runs instead of 10" + (f"; {small}{rounds}." if scale == "cpu" else ".")


@lru_cache(maxsize=16)
def _sizes(experiment: Experiment) -> np.ndarray:
    """How many examples every client holds; in none of the three cases does this depend on the seed."""
    return experiment.fleet()[0].sizes


def _fixed(experiment: Experiment, total: int) -> Experiment:
    """The steps of the FedVeca run dealt out by data, the same in every round."""
    sizes = _sizes(Experiment(data=experiment.data, partition=experiment.partition))
    steps = np.maximum(1, total * sizes // (experiment.rounds * sizes.sum()))
    return Experiment.parse(experiment.dump() | {"steps": steps.tolist()})


def _alone(experiment: Experiment, total: int, share: int = 1) -> Experiment:
    """One client that has all the data does all the steps of the FedVeca run, or one part in `share` of them."""
    steps = max(1, round(total / experiment.rounds / share))
    return Experiment.parse(experiment.dump() | {"partition": {"name": "iid", "clients": 1}, "steps": steps})


def _compare(row: str, make: Any, printed: dict[str, tuple[float, float]] | None = None) -> list[Cell]:
    """FedVeca, and all it is compared with."""
    values = {column: dict(zip((LOSS.name, ACCURACY.name), pair)) for column, pair in (printed or {}).items()}
    cells = [Cell(row, "FedVeca", make("fedveca"), values.get("FedVeca", {}))]
    for column, method in BASELINES.items():
        cells.append(Cell(row, column, make(method), values.get(column, {}), adapt=_fixed, after="FedVeca"))
    last = values.get("centralised", {})
    return [*cells, Cell(row, "centralised", make("centralised"), last, adapt=_alone, after="FedVeca")]


def _more(make: Any) -> list[Cell]:
    """What the networks leave to ask: does the printed roll-back calm FedVeca, did centralised SGD do fewer steps?"""
    rolled = Cell("case 3", "FedVeca, printed roll-back", make({"name": "fedveca", "rollback": True}))
    fifth = partial(_alone, share=5)
    return [rolled, Cell("case 3", "centralised, a fifth", make("centralised"), adapt=fifth, after="FedVeca")]


# ---------------------------------------------------------------------------------------------- Table I, Figures 5 to 7


def table1_svm(scale: str) -> Item:
    """Even and odd digits; the curves are Figure 5."""
    printed = {
        "FedAvg": (23.13, 85.75), "FedNova": (23.44, 85.32), "FedProx": (23.14, 85.76), "SCAFFOLD": (22.07, 86.92),
        "FedVeca": (22.22, 86.63), "centralised": (22.06, 86.87),
    }  # fmt: skip
    return Item(
        "Table I and Figure 5, MNIST SVM",
        "After 100 rounds FedVeca is ahead of FedAvg, FedNova and FedProx, and close to SCAFFOLD and centralised SGD.",
        tuple(_compare("case 3", _svm, printed)), (LOSS, ACCURACY), seeds=RUNS, choices=OWN + SVM + FAIR,
        derive=_objective, curve=("objective", "rounds"), keep=("accuracy",),
    )  # fmt: skip


def table1_mnist(scale: str) -> Item:
    """The CNN on MNIST; the curves are Figure 5."""
    printed = {
        "FedAvg": (32.32, 90.67), "FedNova": (33.05, 90.37), "FedProx": (32.76, 90.47), "SCAFFOLD": (20.80, 93.86),
        "FedVeca": (24.25, 93.04), "centralised": (22.67, 93.43),
    }  # fmt: skip
    make = partial(_network, data="mnist", scale=scale)
    return Item(
        "Table I and Figure 5, MNIST CNN",
        "After 100 rounds FedVeca is ahead of FedAvg, FedNova and FedProx and near centralised SGD; SCAFFOLD leads.",
        (*_compare("case 3", make, printed if scale == "full" else {}), *_more(make)), (LOSS, ACCURACY),
        choices=OWN + FAIR + NETWORK,
        derive=_objective,
        curve=("objective", "rounds"), keep=("accuracy",), reduced=_reduced(scale),
    )  # fmt: skip


def table1_cifar(scale: str) -> Item:
    """The CNN on CIFAR-10; the curves are Figure 5."""
    printed = {
        "FedAvg": (170.50, 38.62), "FedNova": (171.63, 38.10), "FedProx": (170.77, 38.17), "SCAFFOLD": (163.28, 41.23),
        "FedVeca": (160.32, 42.41), "centralised": (160.88, 42.38),
    }  # fmt: skip
    make = partial(_network, data="cifar-10", scale=scale)
    return Item(
        "Table I and Figure 5, CIFAR-10 CNN",
        "After 100 rounds FedVeca is ahead of all others, centralised SGD among them.",
        (*_compare("case 3", make, printed if scale == "full" else {}), *_more(make)), (LOSS, ACCURACY),
        choices=(*OWN, *FAIR, *NETWORK, CIFAR),
        derive=_objective, curve=("objective", "rounds"), keep=("accuracy",),
        reduced=_reduced(scale, "; 50 rounds instead of 100"),
    )  # fmt: skip


def figure6(scale: str) -> Item:
    """The premise of the analysis, eta tau_k L >= 1."""
    networks = {"MNIST CNN": "mnist", "CIFAR-10 CNN": "cifar-10"}
    cells = [Cell("MNIST SVM", "FedVeca", _svm("fedveca"))]
    cells += [Cell(row, "FedVeca", _network("fedveca", data, scale)) for row, data in networks.items()]

    def within(found: Found, rows: list[str], last: int) -> bool | None:
        values = _all(found, rows, BELOW)
        long = all(run["rounds"] > last for cell in cells for run in found.best(cell))
        return max(values) <= last if found.complete and long else None

    return Item(
        "Figure 6", "eta tau_k L is at least 1 in every round, but for the first few of the SVM.", tuple(cells),
        (BELOW, LEAST), curve=("premise", "rounds"), level=1, keep=("smoothness", "tau_mean"),
        choices=(
            *OWN, *SVM, *NETWORK, CIFAR,
            "L is the largest estimate so far; 'the first few rounds' of the SVM are taken as ten.",
        ),
        claims=(
            Claim("SVM: eta tau_k L >= 1 from round 11 on", lambda found: within(found, ["MNIST SVM"], 10)),
            Claim("networks: eta tau_k L >= 1 from round 2 on", lambda found: within(found, list(networks), 0)),
        ),
        reduced=_reduced(scale, "; 50 rounds instead of 100 for CIFAR-10"),
    )  # fmt: skip


def figure7(scale: str) -> Item:
    """The SVM when data are alike, and when everybody has labels of their own."""
    cells = [cell for case in (1, 2) for cell in _compare(f"case {case}", partial(_svm, case=case))]
    federated = ["FedVeca", *BASELINES]

    def overlap(found: Found) -> bool | None:
        curves = [found.curves("case 1", column, "objective") for column in federated]
        if not all(curves):
            return None
        rounds = np.array(next(iter(curves[0].values()))[0])
        means = np.array([np.mean([values for _, values in runs.values()], axis=0) for runs in curves])
        return float(np.ptp(means, axis=0)[rounds >= 20].max(initial=0)) <= 0.01

    return Item(
        "Figure 7", "All methods overlap when data are iid; FedVeca converges first when everybody has other labels.",
        tuple(cells), (ARRIVES, LOSS, ACCURACY), seeds=RUNS,
        orders=tuple(Order("case 2", "FedVeca", other) for other in BASELINES),
        choices=(
            *OWN, *SVM, *FAIR, "Case 2 says one label a client; with five clients it is two, label modulo five.",
            f"'Converges first' is judged by the first round with a test loss of at most {LEVEL:g}.",
            "Centralised SGD, which does all clients' steps one after the other, is not counted among the overlapping.",
        ),
        claims=(Claim("case 1: from round 20 on the federated methods' mean losses are within 0.01", overlap),),
        derive=_objective, curve=("objective", "rounds"), keep=("accuracy",),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- Figures 8 to 10


def _groups(row: dict[str, Any], experiment: Experiment) -> dict[str, float]:
    """Mean steps of those who share the lower labels and of those who have one parity each."""
    if "tau" not in row:
        return {}
    tau = row["tau"]
    return {"tau_1_to_3": float(np.mean(tau[:3])), "tau_4_and_5": float(np.mean(tau[3:]))}


def _leads(run: Run) -> float:
    """Most steps are given for the least A."""
    adapted = [row["tau"] for row in run.rows if len(set(row.get("tau", ()))) > 1]
    return 100 * float(np.mean([max(tau[3:]) == max(tau) for tau in adapted])) if adapted else math.nan


LEADS = Measure("least A at client 4 or 5, % of rounds", _leads)


def figure8(scale: str) -> Item:
    """What the server sees in one run."""

    def apart(found: Found) -> bool | None:
        values = _all(found, ["case 3"], LEADS)
        return max(values) < 20 if values else None

    return Item(
        "Figure 8", "A of clients 4 and 5, who have labels of their own, lies apart from that of the others.",
        (Cell("case 3", "FedVeca", _svm("fedveca", rounds=50)),),
        (LEADS, replace(final("smoothness", scale=1), lower=True)), seeds=1, derive=_groups,
        curve=("tau_mean", "rounds"), beside=("tau_1_to_3", "tau_4_and_5"),
        keep=("smoothness", "premise", "alpha_bound"),
        choices=(
            *OWN, *SVM,
            "Rows hold no A, but steps, which fall with A: who has the least gets 1 / (1 - alpha) = 20.",
            "In which direction A lies apart is not said in words: that it is rarely the least is our reading.",
        ),
        claims=(
            Claim("client 4 or 5 has the least A in under 20 % of the rounds (by chance: 40 %)", apart, ours=True),
        ),
    )  # fmt: skip


def figure9(scale: str) -> Item:
    """How fast FedVeca may go."""
    columns = {f"1 - alpha = {rest:g}": 1 - rest for rest in (0.5, 0.05, 0.005)}
    slow, middle, fast = columns
    cells = [Cell("case 3", name, _svm({"name": "fedveca", "alpha": alpha})) for name, alpha in columns.items()]

    def rougher(found: Found) -> bool | None:
        values = [found.middle("case 3", column, ROUGH) for column in columns]
        return all(a < b for a, b in zip(values, values[1:])) if found.complete else None

    return Item(
        "Figure 9", "A large 1 - alpha is smooth and slow, a small one fast and rough.", tuple(cells),
        (ARRIVES, ROUGH, LOSS, ACCURACY), seeds=RUNS, derive=_objective, curve=("objective", "rounds"),
        keep=("accuracy",),
        orders=(Order("case 3", fast, middle), Order("case 3", fast, slow), Order("case 3", middle, slow)),
        choices=(
            *OWN, *SVM, f"'Fast' is judged by the first round with a test loss of at most {LEVEL:g}.",
            "'Rough' is judged by how much the loss changes from round to round in the second half.",
        ),
        claims=(Claim("the smaller 1 - alpha, the rougher the curve", rougher),),
    )  # fmt: skip


def figure10(scale: str) -> Item:
    """More clients."""
    many = "FedVeca, 50 clients"
    cells = [Cell("case 3", f"FedVeca, {n} clients", _svm("fedveca", clients=n)) for n in (5, 30, 50)]
    others = {f"{name}, 50 clients": BASELINES[name] for name in ("FedAvg", "FedNova")}
    cells += [
        Cell("case 3", name, _svm(method, clients=50), adapt=_fixed, after=many) for name, method in others.items()
    ]
    return Item(
        "Figure 10", "With 50 clients FedVeca is faster than FedAvg and FedNova.", tuple(cells),
        (ARRIVES, LOSS, ACCURACY), seeds=RUNS, derive=_objective, curve=("objective", "rounds"), keep=("accuracy",),
        orders=tuple(Order("case 3", many, other) for other in others),
        choices=(
            *OWN, *SVM, "A baseline's client does at least one step.",
            "How case 3 deals ten labels to more than ten clients is not stated: clients whose numbers are equal "
            "modulo ten share what one of ten clients would have.",
            f"'Faster' is judged by the first round with a test loss of at most {LEVEL:g}.",
        ),
    )  # fmt: skip


def rollback(scale: str) -> Item:
    """Algorithm 1 to the letter."""
    off, on = "roll-back off", "printed roll-back"
    cells = [
        Cell("case 3", off, _svm("fedveca")),
        Cell("case 3", on, _svm({"name": "fedveca", "rollback": True})),
    ]

    def stalls(found: Found) -> bool | None:
        values = found.values("case 3", on, ROLLED).values()
        return min(values) > 50 if values else None

    return Item(
        "Algorithm 1's roll-back (ours)",
        "Algorithm 1 takes back every round whose mean local loss is above the best so far; runs stall by that.",
        tuple(cells), (LOSS, ACCURACY, ROLLED, STREAK), orders=(Order("case 3", off, on),), choices=BASIC + SVM,
        claims=(Claim("with the printed roll-back most of the 100 rounds are taken back", stalls, ours=True),),
        derive=_objective, curve=("objective", "rounds"), keep=("accuracy",), ours=True,
    )  # fmt: skip


ITEMS = {
    "table1-svm": table1_svm, "table1-mnist-cnn": table1_mnist, "table1-cifar-cnn": table1_cifar, "figure6": figure6,
    "figure7": figure7, "figure8": figure8, "figure9": figure9, "figure10": figure10, "rollback": rollback,
}  # fmt: skip
