"""Every mistake gets one sentence that names the culprit and what would be right, before any work is done."""

import numpy as np
import pytest
import torch
from problems import Quadratics, digits, small_network
from torch import nn

import fedstride as fs

RUNS = [
    (dict(algorithm="fedagrak"), r"unknown method 'fedagrak'; did you mean 'fedagrac'\? Choose from .*scaffold"),
    (dict(algorithm=7), "algorithm must be a name or an instance"),
    (dict(model="cnn"), "model must be a torch.nn.Module, not str"),
    (dict(clients=[1, 2]), r"fs\.Clients\.from_arrays"),
    (dict(steps=0), "steps must be whole numbers from 1, not \\[0\\]"),
    (dict(steps=[1, 2, -3, 4, 5, 6]), "steps must be whole numbers from 1"),
    (dict(steps=2.5), "steps must be whole numbers from 1"),
    (dict(steps=[1, 2]), "steps lists 2 numbers for 6 clients"),
    (dict(steps="many"), "steps must be"),
    (dict(steps=np.ones((2, 6))), r"2, 6\); needed are 3 rounds x 6 clients"),
    (dict(steps=fs.steps.gaussian(-1, 4)), "mean > 0"),
    (dict(steps=fs.steps.unfinished(2, 3)), r"rho in \[0, 1\]"),
    (dict(steps=float("inf")), "steps must be whole numbers from 1"),
    (dict(steps=fs.steps.gaussian("a", 1)), "mean > 0"),
    (dict(seed=-1), "seed must be a whole number from 0"),
    (dict(seed="a"), "seed must be a whole number from 0"),
    (dict(lr=lambda round: [0.1, 0.2]), "one for each of 6 clients; in round 1 it is"),
    (dict(algorithm="scaffnew", lr=[0.1, 0.2, 0.1, 0.1, 0.1, 0.1]), "scaffnew needs the same lr for all clients"),
    (dict(algorithm="fedveca", lr=[0.1, 0.2, 0.1, 0.1, 0.1, 0.1]), "fedveca needs the same lr for all clients"),
    (dict(algorithm="centralised", lr=[0.1] * 6), "lr lists 6 numbers for 1 clients"),
    (dict(participation=fs.participation.uniform(2.0)), "whole number of clients"),
    (dict(participation=fs.participation.bernoulli("a")), "probability above 0"),
    (dict(participation=fs.participation.bernoulli(1e-9)), "out of nearly every round"),
    (dict(schedule="sync"), "schedule must come from fs.schedule"),
    (dict(stop=0.8), "stop must be a Target"),
    (dict(stop=fs.Target(accuracy=0.8)), "the target needs test data"),
    (dict(stop=fs.Target(train_loss=0.8)), "pass train_loss=True"),
    (dict(folder=3), "folder must be a path, not 3"),
    (dict(metrics=[1], test=(np.zeros((3, 1, 8, 8)), np.zeros(3))), "metrics must be a dict"),
    (dict(test=(np.zeros((3, 9)), np.zeros(3, dtype=int))), "the test data do not fit model and loss"),
    (dict(test=(np.full((3, 1, 8, 8), np.nan), np.zeros(3, dtype=int))), "test has NaN or infinity in its inputs"),
    (dict(test=torch.zeros(3)), "test must be a pair"),
    (dict(test=(np.zeros((3, 1, 8, 8)), np.array([0, 1, 17]))), "test has label 17; the model has outputs 0 to 9"),
    (dict(metrics={"seconds": len}, test=(np.zeros((3, 1, 8, 8)), np.zeros(3, dtype=int))), "not be called 'seconds'"),
    (dict(metrics={"own": 7}, test=(np.zeros((3, 1, 8, 8)), np.zeros(3, dtype=int))), "'own' must be a function"),
    (dict(dtype="float64"), "dtype must be torch.float32, torch.float64 or torch.bfloat16, not float64"),
    (dict(lr=lambda round: "fast"), "lr must give numbers; in round 1 it gives 'fast'"),
    (dict(device=None), "unknown device None"),
    (dict(momentum="a"), "momentum must be a number"),
    (dict(folder=None, resume=True), "resume=True needs the folder"),
    (dict(steps=fs.steps.epochs(0)), "epochs must be whole numbers from 1"),
    (dict(lr=0), "lr must be positive, not 0"),
    (dict(lr=float("nan")), "lr must be positive"),
    (dict(lr=[0.1] * 5), "lr lists 5 numbers for 6 clients"),
    (dict(lr="fast"), "lr must be a number"),
    (
        dict(lr=lambda round: -0.1),
        "lr must be one positive number, or one for each of 6 clients; in round 1 it is -0.1",
    ),
    (dict(rounds=0), "rounds must be a whole number from 1"),
    (dict(every=0), "every must be a whole number from 1"),
    (dict(batch_size=2.0), "batch_size must be a whole number from 1, not 2.0"),
    (dict(batch_size=0), "batch_size must be a whole number from 1"),
    (dict(sampling="sorted"), "sampling must be 'replacement', 'shuffle' or a function"),
    (dict(sampling=lambda client, round, step: [0, 10**6]), r"sampling\(\d, 0, 0\) gave \[1000000\]"),
    (dict(sampling=lambda client, round, step: [1.9]), r"sampling\(\d, 0, 0\) gave \[1.9\]; client"),
    (dict(sampling=lambda client, round, step: None), r"sampling\(\d, 0, 0\) gave \[None\]; client"),
    (dict(participation=[[0.9, 1.9]] * 3), "or be a list of cohorts"),
    (dict(robust=fs.robust.Median(), participation=[[0, 1, 2], [0], [1, 2, 3]]), "needs at least 3 replies"),
    (dict(participation=fs.participation.uniform(7)), "7 different clients a round, but the fleet has 6"),
    (dict(participation=fs.participation.uniform(0)), "at least one a round"),
    (dict(participation=fs.participation.bernoulli(0)), "probability above 0"),
    (dict(participation=[[0], [1]]), "lists 2 cohorts for 3 rounds"),
    (dict(participation=[[0], [1], [6]]), "cohort of round 3 names client 6; clients are 0 to 5"),
    (dict(participation=3), "participation must come from fs.participation"),
    (
        dict(algorithm="tracking", participation=fs.participation.uniform(3)),
        "tracking needs every client in every round",
    ),
    (dict(weights="size"), "weights must be 'data', 'uniform' or None"),
    (dict(momentum=1.0), r"momentum must be in \[0, 1\)"),
    (
        dict(algorithm="fednova", momentum=0.9),
        "fednova does not allow local momentum; it has a field momentum of its own",
    ),
    (
        dict(algorithm="tracking", clip=1.0),
        "tracking does not allow local clip; of these options it allows weight_decay",
    ),
    (dict(device="tpu9"), "unknown device 'tpu9'"),
    (dict(backend="jax"), "unknown backend 'jax'; choose from auto, sequential, vmap"),
    (dict(dtype=torch.float16), "dtype must be torch.float32, torch.float64 or torch.bfloat16"),
    (dict(metrics={"x": len}), "metrics need test data"),
    (dict(test=(np.zeros((3, 1, 8, 8)), np.zeros(2))), r"test has inputs of shape \(3, 1, 8, 8\) but targets"),
    (dict(model=nn.Linear(3, 2)), r"the model cannot take the clients' inputs of shape \(1, 8, 8\)"),
    (dict(loss=lambda out, y: out), "the loss must return a scalar"),
    (dict(loss="cross_entropy"), "loss must be a function .* such as fs.losses.cross_entropy, not 'cross_entropy'"),
    (dict(loss=nn.CrossEntropyLoss), "loss must be a function"),
    (dict(model=small_network().double()), "the model is in float64 and would train in torch.float32; pass dtype="),
    (dict(model=nn.Sequential(nn.Flatten(), nn.LazyLinear(10))), "the model has lazy layers without shapes"),
    (dict(loss=fs.losses.least_squares), "the loss cannot take outputs of shape"),
    (dict(model=nn.Flatten()), "no trainable parameters"),
    (
        dict(schedule=fs.schedule.Sync(fs.participation.full()), participation=fs.participation.uniform(2)),
        "given twice",
    ),
]


@pytest.mark.parametrize(("changes", "words"), RUNS, ids=[str(i) for i in range(len(RUNS))])
def test_bad_settings(changes, words, tmp_path):
    clients, _ = digits()
    settings = dict(algorithm="fedavg", model=small_network(), clients=clients, rounds=3, device="cpu")
    settings |= dict(folder=tmp_path / "run") | changes
    with pytest.raises(fs.FedstrideError, match=words) as caught:
        fs.simulate(settings.pop("algorithm"), settings.pop("model"), settings.pop("clients"), **settings)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists() or callable(changes.get("sampling"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fs.algorithms.FedProx(mew=1), "fedprox has no option 'mew'; it has mu"),
        (lambda: fs.algorithms.make("scaffold", option="III"), "option must be one of I, II, not 'III'"),
        (lambda: fs.algorithms.FedAvg(server_lr=-1), "server_lr must be a number in"),
        (lambda: fs.algorithms.FedaGrac(calibration="high"), "calibration must be a number from 0, or stages"),
        (lambda: fs.algorithms.FedVeca(alpha=1.5), "alpha must be a number in"),
        (lambda: fs.algorithms.FedVeca(tau_start=1), "tau_start must be a whole number from 2 to 50"),
        (lambda: fs.algorithms.FedaGrac(calibration=((51, 0.5), (1, 0.1))), "ascending order"),
        (lambda: fs.algorithms.FedaGrac(calibration=float("nan")), "calibration must be a number"),
        (lambda: fs.algorithms.FedAdam(beta2=5.0), "beta2 must be a number in"),
        (lambda: fs.losses.Loss(len, "average"), "reduction must be 'mean' or 'sum'"),
        (lambda: fs.Clients.from_arrays([(np.array(["a"]), np.ones(1))]), "client 0 has data that are not arrays"),
        (lambda: fs.algorithms.make("zzz"), r"unknown method 'zzz'\. Choose from"),
        (lambda: fs.Target(), "needs accuracy, loss or train_loss"),
        (lambda: fs.Target(train_loss="0.8"), "the train_loss of a Target must be a number, not '0.8'"),
        (lambda: fs.Target(accuracy="0.8"), "the accuracy of a Target must be a number"),
        (
            lambda: Quadratics().run("fedavg", test=(np.ones((3, 4)), np.ones((3, 1))), stop=fs.Target(accuracy=0.8)),
            "the target is an accuracy, which needs classes",
        ),
        (lambda: fs.Clients.from_arrays([]), "there are no clients"),
        (
            lambda: fs.Clients.from_arrays([(np.ones((2, 3)), np.ones(2)), (np.ones((0, 3)), np.ones(0))]),
            "client 1 has no data",
        ),
        (lambda: fs.Clients.from_arrays([(np.ones((2, 3)), np.ones(3))]), "client 0 has inputs of shape"),
        (
            lambda: fs.Clients.from_arrays([(np.ones((2, 3)), np.ones(2)), (np.ones((2, 4)), np.ones(2))]),
            "client 1 has examples",
        ),
        (
            lambda: fs.Clients.from_arrays([(np.full((2, 3), np.nan), np.ones(2))]),
            "client 0 has NaN or infinity in its inputs",
        ),
        (lambda: fs.Clients.from_arrays([(np.ones((2, 3)), np.array([1, np.inf]))]), "infinity in its targets"),
    ],
)
def test_bad_objects(make, words):
    with pytest.raises(fs.FedstrideError, match=words):
        make()


def test_a_metric_gives_one_number():
    clients, test = digits()
    with pytest.raises(fs.FedstrideError, match="'own' must give one number, not"):
        metrics = {"own": lambda outputs, targets: outputs}
        fs.simulate("fedavg", small_network(), clients, rounds=1, lr=0.1, test=test, metrics=metrics)


def test_an_accuracy_is_a_share():
    with pytest.raises(fs.FedstrideError, match="a share from 0 to 1, not 90"):
        fs.Target(accuracy=90)


def test_cuda_is_not_silently_replaced():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(fs.FedstrideError, match="torch sees no GPU here"):
        Quadratics().run("fedavg", device="cuda")


def test_a_file_in_the_way_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    clients, _ = digits()
    with pytest.raises(fs.FedstrideError, match="cannot write to the folder"):
        fs.simulate("fedavg", small_network(), clients, rounds=1, folder=tmp_path / "file" / "run", device="cpu")


def test_labels_and_weights_that_cannot_be():
    pairs = [(np.zeros((3, 64), dtype=np.float32), np.array([0, 1, label])) for label in (2, 12)]
    with pytest.raises(fs.FedstrideError, match="client 1 has label 12; the model has outputs 0 to 9"):
        fs.simulate("fedavg", nn.Linear(64, 10), fs.Clients.from_arrays(pairs), rounds=1, device="cpu")
    broken = nn.Linear(64, 10)
    nn.init.constant_(broken.weight, float("nan"))
    with pytest.raises(fs.FedstrideError, match="starting weights contain NaN"):
        fs.simulate("fedavg", broken, fs.Clients.from_arrays(pairs[:1]), rounds=1, device="cpu")


def test_numbers_of_numpy_are_numbers():
    problem = Quadratics()
    one = problem.run(fs.algorithms.FedAvg(server_lr=np.float32(1)), rounds=2, batch_size=np.int64(3), seed=np.int64(4))
    two = problem.run(fs.algorithms.FedAvg(server_lr=1), rounds=2, batch_size=3, seed=4)
    assert torch.equal(one.x, two.x)
    assert fs.algorithms.FedVeca(tau_max=np.int64(50)).tau_max == 50


def test_a_taken_name_is_refused():
    with pytest.raises(fs.FedstrideError, match="'fedavg' is registered already"):

        @fs.algorithm.register("fedavg")
        class Mine(fs.algorithm.Algorithm):
            pass
