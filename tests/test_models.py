"""The papers' networks: their sizes, their behaviour under every backend, and the words of their errors."""

import numpy as np
import pytest
import torch
from problems import digits
from torch import nn

import fedstride as fs
from fedstride.losses import squared_hinge

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)
COUNTS = [
    ("logistic", dict(inputs=123, classes=2), 248),
    ("logistic", dict(inputs=MNIST, classes=10), 7_850),
    ("cnn-fedagrac", {}, 260 + 5_020 + 16_050 + 510),
    ("alexnet-fedagrac", {}, 7_212_874),
    ("vgg19-fedagrac", {}, 20_554_826),
    ("svm-fedveca", {}, 784),
    ("cnn-fedveca", {}, 430_698),
    ("cnn-fedveca", dict(inputs=CIFAR), 555_178),
    ("cnn-dlsgd", {}, 582_026),
    ("cnn-dlsgd", dict(inputs=CIFAR), 878_538),
    ("mlp-fedlga", {}, 318_010),
    ("cnn-tracking", {}, 620_362),
    ("cnn-tracking", dict(classes=100), 643_492),
    # As published with BatchNorm, whose scales and shifts are as many.
    ("resnet18-fedlga", {}, 11_173_962),
    ("resnet20", {}, 272_474),
    ("linear", {}, 100),
    ("mlp", {}, 64 * 64 + 64 + 64 * 10 + 10),
    ("cnn", {}, (9 * 16 + 16) + (9 * 16 * 32 + 32) + (128 * 32 + 32) + (32 * 10 + 10)),
]
LARGE = {"alexnet-fedagrac", "vgg19-fedagrac", "resnet18-fedlga"}


def shape_of(name, options):
    inputs = options.get("inputs", fs.models.BUILDERS[name].__defaults__[0])
    return inputs if isinstance(inputs, tuple) else (inputs,)


@pytest.mark.parametrize("name, options, count", COUNTS, ids=lambda value: str(value))
def test_parameters_and_outputs(name, options, count):
    model = fs.models.make(name, **options)
    assert sum(p.numel() for p in model.parameters()) == count
    assert all(p.requires_grad for p in model.parameters()) and all(layer.training for layer in model.modules())
    outputs = model(torch.rand(2, *shape_of(name, options)))
    assert outputs.shape == ((2,) if name in ("svm-fedveca", "linear") else (2, options.get("classes", 10)))
    assert torch.isfinite(outputs).all()


def test_every_network_is_counted():
    assert {name for name, _, _ in COUNTS} == set(fs.models.names())


def fleet(shape, labels, clients=3, each=4):
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(each, *shape)), rng.choice(labels, each)) for _ in range(clients)]
    return fs.Clients.from_arrays(pairs)


@pytest.mark.parametrize("name", sorted(set(fs.models.names()) - LARGE))
def test_backends_agree(name):
    svm = name in ("svm-fedveca", "linear")
    model = fs.models.make(name)
    clients = fleet(shape_of(name, {}), [-1, 1] if svm else 10)
    settings = dict(rounds=1, steps=1, batch_size=2, lr=0.1, device="cpu", dtype=torch.float64)
    settings |= dict(loss=squared_hinge) if svm else {}
    one, two = (fs.simulate("fedavg", model, clients, backend=b, **settings) for b in ("sequential", "vmap"))
    assert one.backend != two.backend
    start = nn.utils.parameters_to_vector(model.parameters()).double()
    assert (one.x - start).abs().max() > 1e-6
    torch.testing.assert_close(one.x, two.x, rtol=1e-10, atol=1e-12)


def test_whole_channels_are_dropped_the_same_way_by_all_backends():
    """A weight behind a dropped channel gets no gradient, so the step shows the mask."""
    model = nn.Sequential(nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(6 * 4, 3, bias=False))
    clients = fleet((6, 2, 2), 3, clients=4, each=1)
    settings = dict(rounds=1, steps=1, batch_size=1, lr=1.0, device="cpu", dtype=torch.float64)
    one, two = (fs.simulate("fedavg", model, clients, backend=b, **settings) for b in ("sequential", "vmap"))
    torch.testing.assert_close(one.x, two.x, rtol=1e-12, atol=1e-14)
    alone = fs.simulate("fedavg", model, clients, participation=[[0]], **settings)
    moved = (alone.x - nn.utils.parameters_to_vector(model.parameters()).double()).view(3, 6, 4).abs() > 0
    channels = moved.flatten(2).any(2)[0]
    assert 0 < channels.sum() < 6  # some channels were dropped ...
    assert torch.equal(moved, channels[None, :, None].expand_as(moved))  # ... each as a whole


@pytest.mark.parametrize(
    "name, layers",
    [
        ("cnn-fedagrac", [("Dropout2d", 0.5), ("Dropout", 0.5)]),
        ("alexnet-fedagrac", [("Dropout", 0.5), ("Dropout", 0.5)]),
        ("vgg19-fedagrac", [("Dropout", 0.5), ("Dropout", 0.5)]),
        ("cnn-tracking", [("Dropout", 0.25)]),
        ("cnn-dlsgd", []),
    ],
)
def test_dropout_is_the_papers(name, layers):
    model = fs.models.make(name)
    assert [(type(layer).__name__, layer.p) for layer in model.modules() if hasattr(layer, "p")] == layers


def test_weights_come_from_the_seed_alone():
    def weights(**options):
        return nn.utils.parameters_to_vector(fs.models.make("cnn-fedagrac", **options).parameters())

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = weights()
    assert torch.equal(torch.rand(3), expected), "the global generator moved"
    assert torch.equal(weights(seed=0), first)
    assert not torch.equal(weights(seed=1), first)


def test_vgg_lets_the_image_through():
    """From torch's own start both numbers are below 1e-7."""
    model = fs.models.make("vgg19-fedagrac").eval()
    outputs = model(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert outputs.std(0).mean() > 1e-5
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(outputs, torch.arange(4)), model[0][0].weight)
    assert gradient.norm() > 1e-4


def test_large_images_get_the_large_stem():
    model = fs.models.make("resnet18-fedlga", inputs=(3, 64, 64), classes=10)
    assert sum(p.numel() for p in model.parameters()) == 11_181_642


def test_squared_hinge_by_hand():
    scores, labels = torch.tensor([0.5, 2.0, 0.5, -3.0]), torch.tensor([1, 1, -1, -1])
    # 1 - y s: 0.5, -1, 1.5, -2
    assert squared_hinge(scores, labels).item() == pytest.approx((0.125 + 0 + 1.125 + 0) / 4)
    assert squared_hinge(scores[:, None], labels).item() == pytest.approx(1.25 / 4)
    assert fs.models.sign_accuracy(scores, labels).item() == 0.75


def test_squared_svm_descends_the_papers_objective():
    """0.05 |w|^2 + 1/2 mean max(0, 1 - y w.x)^2 over all examples, descended by hand."""
    clients, _ = digits(3, 40)
    pairs = [clients.data(i) for i in range(3)]
    clients = fs.Clients.from_arrays([(images, 1 - 2 * (labels % 2)) for images, labels in pairs])
    x, y = clients.inputs.double().flatten(1), clients.targets.double()
    w = torch.zeros(64, dtype=torch.float64)
    for _ in range(20):
        w = w - 0.1 * (0.1 * w - ((1 - y * (x @ w)).clamp(min=0) * y) @ x / len(y))
    settings = dict(loss=squared_hinge, rounds=20, steps=1, lr=0.1, batch_size=None, weight_decay=0.1)
    settings |= dict(test=(clients.inputs, clients.targets), every=20, metrics={"accuracy": fs.models.sign_accuracy})
    model = fs.models.make("svm-fedveca", inputs=(1, 8, 8))
    result = fs.simulate("fedavg", model, clients, dtype=torch.float64, device="cpu", **settings)
    torch.testing.assert_close(result.x, w, rtol=1e-10, atol=1e-12)
    assert result.rows[-1]["accuracy"] == ((x @ w).sign() == y).double().mean() > 0.8


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("cnn-dlgsd", {}, "unknown model 'cnn-dlgsd'; did you mean 'cnn-dlsgd'"),
        ("zzz", {}, "unknown model 'zzz'. Choose from alexnet-fedagrac"),
        (3, {}, "unknown model 3"),
        ("cnn-dlsgd", dict(inputs=(1, 8, 8)), r"cnn-dlsgd cannot take inputs of shape \(1, 8, 8\).*\(1, 28, 28\)"),
        ("cnn-dlsgd", dict(inputs=784), r"cnn-dlsgd cannot take inputs of shape \(784,\)"),
        ("resnet18-fedlga", dict(inputs=784), r"resnet18-fedlga cannot take inputs of shape \(784,\)"),
        ("svm-fedveca", dict(classes=2), "svm-fedveca has no option 'classes'; it has inputs"),
        ("logistic", dict(inputs="mnist"), "inputs must be the shape of one example"),
        ("logistic", dict(inputs=(0, 3)), "inputs must be the shape of one example"),
        ("logistic", dict(classes=0), "classes must be a whole number from 1"),
        ("logistic", dict(seed=0.5), "seed must be a whole number from 0"),
    ],
)
def test_mistakes_are_answered_in_words(name, options, words):
    with pytest.raises(fs.FedstrideError, match=words) as error:
        fs.models.make(name, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [int, np.uint8, float, bool])
def test_squared_hinge_refuses_other_labels(kind):
    clients = fs.Clients.from_arrays([(np.ones((3, 4)), np.array([0, 1, 1], dtype=kind))])
    with pytest.raises(fs.FedstrideError, match=r"the loss is for labels \(-1, 1\), but a client has (0|False)"):
        fs.simulate("fedavg", fs.models.make("svm-fedveca", inputs=4), clients, loss=squared_hinge, rounds=1)


def test_even_and_odd_labels_by_hand():
    scores, digits = torch.tensor([0.5, 0.5, -2.0]), torch.tensor([4, 7, 3])  # right, wrong, right beyond the margin
    assert fs.losses.parity_hinge(scores, digits).item() == pytest.approx((0.125 + 1.125 + 0) / 3)
    assert fs.models.parity_accuracy(scores, digits).item() == pytest.approx(2 / 3)


def test_the_penalty_of_weight_decay_is_in_the_rows():
    clients = fleet((1, 8, 8), 10)
    model, test = fs.models.make("logistic", inputs=(1, 8, 8)), clients.data(0)
    result = fs.simulate("fedavg", model, clients, rounds=1, weight_decay=0.1, test=test)
    assert result.rows[-1]["penalty"] == pytest.approx(0.05 * float(result.x.double().square().sum()))
    assert "penalty" not in fs.simulate("fedavg", model, clients, rounds=1, test=test).rows[-1]
