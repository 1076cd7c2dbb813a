"""The vector view, the gradient oracle, sampling, and local training."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from problems import Quadratics, digits, small_network
from torch import nn

import fedstride as fs
from fedstride import oracle as oracles
from fedstride.descent import Local, Moving, shifted
from fedstride.graph import padded
from fedstride.keys import job_keys
from fedstride.oracle import Batch, Vmap, choose, make
from fedstride.sampling import Jobs, Sampler
from fedstride.train import Work
from fedstride.vector import VectorModel

CPU = torch.device("cpu")


def run(model, clients, **changes):
    settings = dict(rounds=3, lr=0.1, steps=[4, 1, 3, 2, 5, 2], batch_size=5, device="cpu", dtype=torch.float64)
    return fs.simulate(changes.pop("method", "fedavg"), model, clients, **(settings | changes))


def agree(one, two, tolerance=1e-10):
    torch.testing.assert_close(one.x, two.x, rtol=tolerance, atol=tolerance)


def test_vector_and_back():
    model = small_network()
    vector = VectorModel(model, torch.float32)
    assert len(vector.x) == sum(p.numel() for p in model.parameters())
    again = vector.loaded(vector.x + 1)
    for mine, theirs in zip(again.parameters(), model.parameters()):
        torch.testing.assert_close(mine, theirs + 1)
    inputs = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(vector.predict(vector.x, inputs), model.eval()(inputs))


def test_frozen_parameters_stay_and_are_not_in_the_vector():
    model = small_network()
    model[0].weight.requires_grad_(False)
    clients, _ = digits()
    result = run(model, clients)
    assert len(result.x) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert torch.equal(result.model[0].weight, model[0].weight)
    assert not torch.equal(result.model[5].weight, model[5].weight)
    agree(result, run(model, clients, backend="vmap"))


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(64, 64)
            self.two = nn.Linear(64, 64)
            self.two.weight = self.one.weight
            self.out = nn.Linear(64, 10)

        def forward(self, x):
            return self.out(self.two(self.one(x.flatten(1))).tanh())

    torch.manual_seed(0)
    model, (clients, _) = Tied(), digits()
    sequential, batched = (run(model, clients, backend=backend) for backend in ("sequential", "vmap"))
    agree(sequential, batched)
    assert len(sequential.x) == 64 * 64 + 64 + 64 + 650


def test_unused_parameters_get_zero_gradients():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(64, 10), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x.flatten(1))

    torch.manual_seed(0)
    model, (clients, _) = Idle(), digits()
    for backend in ("sequential", "vmap"):
        result = run(model, clients, backend=backend)
        assert torch.equal(result.model.unused.weight, model.unused.weight)


def test_batchnorm_is_refused_in_words_unless_its_statistics_are_off():
    clients, _ = digits()
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    with pytest.raises(fs.FedstrideError, match=r"layer '1' is a BatchNorm with running statistics.*GroupNorm"):
        run(model, clients)
    model[1] = nn.BatchNorm2d(4, track_running_stats=False)
    agree(run(model, clients, backend="sequential"), run(model, clients, backend="vmap"))
    # Padding would change the statistics of a batch, so ragged batches must go unpadded.
    ragged = dict(sampling="shuffle", batch_size=11)
    agree(run(model, clients, backend="sequential", **ragged), run(model, clients, backend="vmap", **ragged))
    model[1] = nn.GroupNorm(2, 4)
    agree(run(model, clients, backend="sequential"), run(model, clients, backend="vmap"))


def test_modules_with_a_life_of_their_own_are_refused():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(64, 10)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.out(x.flatten(1))

    class Noisy(nn.Sequential):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    clients, _ = digits()
    with pytest.raises(fs.FedstrideError, match="changes its buffer 'calls'"):
        run(Counter(), clients)
    with pytest.raises(fs.FedstrideError, match=r"random numbers outside nn\.Dropout"):
        run(Noisy(nn.Flatten(), nn.Linear(64, 10)), clients)


def test_dropout_is_keyed_by_client_and_step_not_by_order():
    clients, _ = digits()
    model = small_network(0.5)
    whole = run(model, clients, backend="vmap")
    state = torch.random.get_rng_state()
    torch.manual_seed(123)
    agree(whole, run(model, clients, backend="sequential", chunk=1))
    torch.random.set_rng_state(state)
    assert not torch.equal(whole.x, run(model, clients, seed=1).x)
    off = run(small_network(0.0), clients)
    assert not torch.allclose(whole.x, off.x)


def test_dropout_keeps_the_right_share_and_scale():
    from fedstride.vector import KeyedDropout

    for channelwise, shape in ((False, (50, 400)), (True, (200, 100, 3, 3))):
        layer = KeyedDropout(0.3, channelwise)
        layer.key = torch.tensor(12345)
        out = layer(torch.ones(shape))
        assert out.unique().tolist() == pytest.approx([0, 1 / 0.7])
        assert out.mean().item() == pytest.approx(1, abs=0.03)
        if channelwise:
            assert (out.flatten(2).std(2) == 0).all()
        layer.eval()
        assert torch.equal(layer(torch.ones(shape)), torch.ones(shape))


def test_sequential_threads_give_the_same_bytes_as_one_thread():
    clients, _ = digits()
    model = small_network(0.3)
    one = run(model, clients, backend="sequential", method="fedagrac")
    torch.set_num_threads(2)
    try:
        two = run(model, clients, backend="sequential", method="fedagrac")
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one.x, two.x)


@pytest.mark.parametrize("clients, threads", [(3, 1), (30, 2)])
def test_small_cohorts_run_on_one_thread_and_leave_the_others_alone(clients, threads):
    fleet = fs.partition.iid(fs.data.load("digits"), clients=clients)
    seen = []
    torch.set_num_threads(2)
    try:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))
        show = lambda row: seen.append(torch.get_num_threads())  # noqa: E731
        fs.simulate("fedavg", model, fleet, rounds=1, steps=1, backend="vmap", device="cpu", progress=show)
        assert seen == [threads] and torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError):
            fs.simulate("fedavg", model, fleet, rounds=1, backend="vmap", device="cpu", progress=lambda row: 1 / 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_auto_follows_its_stated_rule():
    linear, conv = (VectorModel(layer, torch.float32) for layer in (nn.Linear(784, 400), nn.Conv2d(1, 2, 3)))
    assert [choose("auto", model, CPU, 10) for model in (linear, conv)] == ["vmap", "sequential"]
    assert choose("auto", linear, CPU, 1) == "sequential"
    assert choose("auto", conv, torch.device("cuda"), 10) == "graph"


@pytest.mark.parametrize(
    "loss",
    [fs.losses.cross_entropy, nn.CrossEntropyLoss(), nn.functional.cross_entropy, nn.CrossEntropyLoss(reduction="sum")],
)
@pytest.mark.parametrize("settings", [dict(batch_size=None), dict(batch_size=6, sampling="shuffle")])
def test_ragged_batches_agree_for_every_kind_of_loss(loss, settings):
    clients, _ = digits()
    rates = dict(lr=0.005 if getattr(loss, "reduction", "") == "sum" else 0.1)
    one, two = (
        run(small_network(), clients, backend=b, loss=loss, **settings, **rates) for b in ("sequential", "vmap")
    )
    agree(one, two)


def test_class_weights_are_not_silently_dropped():
    clients, _ = digits()
    weights = torch.linspace(0.1, 3, 10, dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=weights)
    one, two = (run(small_network(), clients, backend=b, loss=loss, batch_size=None) for b in ("sequential", "vmap"))
    agree(one, two)
    inputs, targets = (part.double() if part.is_floating_point() else part for part in clients.data(3))
    model = small_network().double()
    grads = torch.autograd.grad(loss(model(inputs), targets), list(model.parameters()))
    alone = fs.Clients.from_arrays([clients.data(3)])
    step = run(small_network(), alone, loss=loss, batch_size=None, rounds=1, steps=1, lr=1.0)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(start - step.x, torch.cat([g.flatten() for g in grads]), rtol=1e-10, atol=1e-10)


def test_class_weights_are_noticed_even_if_the_first_client_has_one_class():
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(n, 4)), np.zeros(n, dtype=int) if n == 5 else rng.integers(0, 2, n)) for n in (5, 3, 7)]
    clients, weight = fs.Clients.from_arrays(pairs), torch.tensor([1.0, 20.0], dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    settings = dict(batch_size=None, steps=3, backend="vmap")
    module = run(model, clients, loss=nn.CrossEntropyLoss(weight=weight), **settings)
    function = run(model, clients, loss=lambda o, t: nn.functional.cross_entropy(o, t, weight=weight), **settings)
    agree(module, function)
    ignoring = fs.Clients.from_arrays([pairs[0], pairs[2], (pairs[1][0], np.array([0, -100, 1]))])
    module = run(model, ignoring, loss=nn.CrossEntropyLoss(), **settings)
    agree(module, run(model, ignoring, loss=lambda o, t: nn.functional.cross_entropy(o, t), **settings))


def test_models_that_mix_examples_are_found_out():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 8), nn.Linear(8, 10)

        def forward(self, x):
            z = self.one(x.flatten(1))
            return self.two(z - z.mean(0))

    torch.manual_seed(0)
    model, (clients, _) = Centred(), digits()
    settings = dict(batch_size=None)
    agree(run(model, clients, backend="sequential", **settings), run(model, clients, backend="vmap", **settings))


def test_batch_statistics_need_two_examples():
    clients, _ = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 10)
    )
    with pytest.raises(fs.FedstrideError, match="some batch would have one example"):
        run(model, clients, batch_size=1)


def test_a_dropout_layer_used_twice_drops_different_values():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.scale = nn.Dropout(0.5), nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.scale * (self.drop(torch.ones_like(x)) * 10 + self.drop(torch.ones_like(x)))

    model = VectorModel(Twice(), torch.float32)
    key = torch.tensor(7)
    out = model.outputs(model.x, torch.zeros(50, 20), key)
    assert set(out.unique().tolist()) == {0.0, 2.0, 20.0, 22.0}
    assert torch.equal(out, model.outputs(model.x, torch.zeros(50, 20), key))

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.drop = nn.Linear(64, 8), nn.Linear(8, 10), nn.Dropout(0.4)

        def forward(self, x):
            return self.two(self.drop(self.one(self.drop(x.flatten(1)))))

    torch.manual_seed(0)
    shared, (clients, _) = Shared(), digits()
    agree(run(shared, clients, backend="sequential"), run(shared, clients, backend="vmap"))


def test_data_dependent_losses_fall_to_the_sequential_backend():
    def picky(outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss if loss > 0.1 else 2 * loss

    clients, _ = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.warns(UserWarning, match="vmap cannot take this model and loss, `sequential` goes on: vmap: It looks"):
        assert run(model, clients, loss=picky).backend == "sequential"
    with pytest.raises(fs.FedstrideError, match="the vmap backend cannot take this model and loss.*'sequential'"):
        run(model, clients, loss=picky, backend="vmap")


def test_small_integer_labels_and_one_dimensional_outputs():
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(9, 4)), rng.integers(0, 3, 9).astype(np.uint8)) for _ in range(3)]
    assert run(nn.Linear(4, 3), fs.Clients.from_arrays(pairs), steps=2).status == "finished"

    class Flat(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, 0]

    flat = fs.Clients.from_arrays([(rng.normal(size=(9, 4))[::-1], rng.normal(size=9)) for _ in range(3)])
    assert run(Flat(4, 1), flat, steps=2, loss=fs.losses.least_squares).status == "finished"


def test_the_gradient_exchange_of_a_replay_has_a_batch_of_its_own():
    clients, _ = digits()
    asked = []

    def sampling(client, round, step):
        asked.append((client, round, step))
        return [0, 1]

    run(small_network(), clients, method="fedtrack", rounds=1, steps=[2] * 6, sampling=sampling)
    assert sorted(asked) == [(client, 0, step) for client in range(6) for step in range(3)]


def test_full_gradients_do_not_depend_on_the_chunk(monkeypatch):
    clients, _ = digits()
    settings = dict(batch_size=None, method="scaffold", backend="vmap")
    whole = run(small_network(), clients, **settings)
    monkeypatch.setattr(fs.train, "ELEMENTS", 64 * 6 * 3)  # three examples of each client at a time
    agree(whole, run(small_network(), clients, **settings))
    agree(whole, run(small_network(), clients, **settings | {"backend": "sequential"}))


def test_full_gradients_with_dropout_do_not_depend_on_the_cohort(monkeypatch):
    clients, _ = digits()
    monkeypatch.setattr(fs.train, "ROW", 64 * 4)  # four examples of a client at a time
    runs = [
        run(small_network(0.4), clients, batch_size=None, method="scaffold", backend=backend, chunk=chunk)
        for backend, chunk in (("vmap", None), ("vmap", 2), ("sequential", None))
    ]
    agree(runs[0], runs[1])
    agree(runs[0], runs[2])


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedagrac", "fedveca"])
def test_a_cohort_whose_batches_are_large_trains_piece_by_piece(method, monkeypatch):
    """Six clients with mini-batches of eight examples, of which two are kept: three pieces."""
    clients, _ = digits()
    settings = dict(method=method, backend="vmap", batch_size=8)
    whole, cut, pieces = run(small_network(0.4), clients, **settings), fs.oracle.Vmap.blocks, []
    monkeypatch.setattr(fs.heap, "BLOCK", 5 * 8 * 64 * whole.x.element_size() // 2)
    monkeypatch.setattr(fs.oracle.Vmap, "blocks", lambda *given: pieces.append(cut(*given)) or pieces[-1])
    agree(whole, run(small_network(0.4), clients, **settings))
    assert {len(one) for one in pieces} == {3}


def test_batches_gathered_ahead_change_nothing(monkeypatch):
    clients, _ = digits()
    whole = run(small_network(), clients, backend="vmap")
    monkeypatch.setattr(fs.train, "GATHER", 1)
    assert torch.equal(whole.x, run(small_network(), clients, backend="vmap").x)


def test_no_wasted_gradients():
    """The active prefix shrinks: the oracle sees exactly as many rows as there are steps."""
    problem, rows = Quadratics(), []
    original = fs.oracle.Vmap.__call__

    def count(self, y, batch):
        rows.append(len(y))
        return original(self, y, batch)

    fs.oracle.Vmap.__call__ = count
    try:
        problem.run("fedprox", rounds=1, steps=[1, 9, 4, 4, 2, 7])
    finally:
        fs.oracle.Vmap.__call__ = original
    rows = rows[1:]  # the first call tried out the backend
    assert sum(rows) == 27 and rows == sorted(rows, reverse=True) and rows[0] == 6 and rows[-1] == 1


def test_draws_with_replacement_are_of_the_clients_own_examples():
    clients = fs.Clients.from_arrays([(torch.full((size, 1), float(size)), torch.zeros(size)) for size in (3, 7, 5)])
    who, zeros = np.array([2, 0, 1]), np.zeros(3, dtype=np.int64)
    jobs = Jobs(who, zeros, zeros, zeros, zeros, zeros, zeros)
    rows = Sampler(clients, 4, "replacement").table(jobs, job_keys(0, "train", *jobs[:3], CPU), 0, 50)
    for row, client in zip(rows, who):
        first = clients.offsets[client]
        assert row.shape == (50, 4) and row.unique().tolist() == list(range(first, first + clients.sizes[client]))


def test_shuffle_visits_everything_once_an_epoch():
    clients = fs.Clients.from_arrays([(np.zeros((n, 1)), np.zeros(n)) for n in (7, 12)])
    sampler = Sampler(clients, 5, "shuffle")
    jobs = fs.sampling.Jobs(
        np.arange(2), *(np.zeros(2, dtype=np.int64) for _ in range(2)), *(np.full(2, 6) for _ in range(4))
    )
    keys = torch.tensor([11, 22])
    for client, n, passes in ((0, 7, 2), (1, 12, 3)):
        batches = sampler.batches(jobs, keys, 0, 6)
        seen = [batch.rows[client, : batch.counts[client]].tolist() for batch in batches]
        epochs = [sum(seen[start : start + passes], []) for start in range(0, 6, passes)]
        for epoch in epochs:
            assert sorted(epoch) == sorted(clients.order[clients.offsets[client] :][:n].tolist())
        assert epochs[0] != epochs[1]
        later = sampler.batches(jobs, keys, 3, 6)
        assert [batch.rows[client, : batch.counts[client]].tolist() for batch in later] == seen[3:]


def test_somebody_elses_run_is_replayed_exactly():
    """Batches, steps and cohorts from a list, against a plain PyTorch loop."""
    clients, _ = digits()
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 4, (3, 6))
    cohorts = [[0, 2, 3], [1, 2, 5, 5], [4, 0]]
    batches = {
        (client, round, step): rng.integers(0, clients.sizes[client], rng.integers(1, 7))
        for client in range(6)
        for round in range(3)
        for step in range(4)
    }
    model = small_network().double()
    loss = nn.CrossEntropyLoss()
    x = torch.cat([p.detach().flatten() for p in model.parameters()])
    weights = clients.sizes / clients.sizes.sum()
    for round, cohort in enumerate(cohorts):
        total, share = torch.zeros_like(x), 0.0
        for client in cohort:
            if steps[round, client] == 0:
                continue
            nn.utils.vector_to_parameters(x.clone(), model.parameters())
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            inputs, targets = clients.data(client)
            for step in range(steps[round, client]):
                chosen = batches[client, round, step]
                optimiser.zero_grad()
                loss(model(inputs[chosen].double()), targets[chosen]).backward()
                optimiser.step()
            y = nn.utils.parameters_to_vector(model.parameters()).detach()
            total, share = total + weights[client] * (y - x), share + weights[client]
        x = x + total / share if share else x
    for backend in ("sequential", "vmap"):
        result = run(
            small_network(), clients, backend=backend, steps=steps, participation=cohorts,
            sampling=lambda client, round, step: batches[client, round, step],
        )  # fmt: skip
        torch.testing.assert_close(result.x, x, rtol=1e-10, atol=1e-10)


def test_local_options_against_torch_sgd():
    clients, _ = digits()
    inputs, targets = (p.double() if p.is_floating_point() else p for p in clients.data(0))
    model = small_network().double()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01)
    for _ in range(5):
        optimiser.zero_grad()
        fs.losses.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimiser.step()
    alone = fs.Clients.from_arrays([clients.data(0)])
    options = dict(momentum=0.8, weight_decay=0.01, clip=0.5)
    result = run(small_network(), alone, rounds=1, steps=5, batch_size=None, **options)
    torch.testing.assert_close(
        result.x, nn.utils.parameters_to_vector(model.parameters()).detach(), rtol=1e-5, atol=1e-6
    )


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: torch sees no CUDA device")


@NO_GPU
@pytest.mark.parametrize("backend", ["vmap", "graph"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedagrac", "tracking"])
def test_gpu_agrees_with_cpu(method, backend):
    clients, test = digits()
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 5e-3)):
        on = {
            device: run(small_network(0.3), clients, method=method, device=device, backend=name, dtype=dtype, test=test)
            for device, name in (("cpu", "sequential"), ("cuda", backend))
        }
        torch.testing.assert_close(on["cuda"].x.cpu(), on["cpu"].x, rtol=tolerance, atol=tolerance)


@NO_GPU
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recordings_equal_vmap_at_every_size(dtype, weighted, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = VectorModel(small_network(0.3), dtype, "cuda")
    each = (fs.losses.cross_entropy.each, "mean")
    graph, vmap = (make(name, model, fs.losses.cross_entropy, each) for name in ("graph", "vmap"))
    torch.manual_seed(0)
    kept = []
    for _ in range(5):
        for rows in (13, 12, 11, 5, 1):  # padded, exact, padded, small, single
            y = model.x + 0.01 * torch.randn(rows, len(model.x), dtype=dtype, device="cuda")
            batch = Batch(
                torch.randn(rows, 4, 1, 8, 8, dtype=dtype, device="cuda"),
                torch.randint(10, (rows, 4), device="cuda"),
                torch.rand(rows, 4, dtype=dtype, device="cuda") if weighted else None,
                torch.randint(1 << 60, (rows,), device="cuda"),
            )
            for one, two in zip(graph(y, batch), vmap(y, batch)):
                torch.testing.assert_close(one, two)
            mine, other = (Moving(y.clone(), *(y.new_full((rows, 1), 0.1),) * 3) for _ in range(2))
            steps = [oracle.hold(at, None, Local(), 10**9) for oracle, at in ((graph, mine), (vmap, other))]
            torch.testing.assert_close(*(held.step(mine.lr, batch) for held in steps))
            for held in steps:
                held.give()
            torch.testing.assert_close(mine.y, other.y)
            kept.append((y, y.clone()))
    assert all(torch.equal(y, before) for y, before in kept)  # nobody's model is written to
    assert sorted(shape[0] for shape in graph._recordings) == [1, 5, 12, 14]


def test_sizes_that_are_recorded():
    sizes = [padded(rows) for rows in range(1, 2000)]
    assert all(rows <= size <= 1.25 * rows for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 45 and {10, 20, 50, 80, 100, 500} <= set(sizes)


def test_graph_backend_needs_a_gpu():
    clients, _ = digits()
    with pytest.raises(fs.FedstrideError, match="needs a CUDA device"):
        run(small_network(), clients, backend="graph", device="cpu")


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize("settings", [{}, dict(batch_size=None), dict(sampling="shuffle"), dict(method="scaffold")])
def test_traced_shapes_give_the_same_bits(monkeypatch, settings, dropout):
    clients, _ = digits()
    settings = dict(backend="vmap", rounds=4, steps=[4, 1, 4, 1, 4, 1]) | settings  # cohorts of six and of three
    plain = run(small_network(dropout), clients, **settings)
    monkeypatch.setattr("fedstride.oracle.TRIES", 2)
    traces = []
    trace = Vmap._trace
    monkeypatch.setattr(Vmap, "_trace", lambda *given: traces.append(trace(*given)) or traces[-1])
    traced = run(small_network(dropout), clients, **settings)
    assert torch.equal(plain.x, traced.x)
    shapes = 2 if "sampling" in settings else 1  # a pass ends with a short batch; cohorts may have any size
    assert len(traces) == shapes and None not in traces


def test_a_loss_that_cannot_be_traced_goes_on_as_before(monkeypatch):
    clients, _ = digits()
    plain = run(small_network(), clients, backend="vmap")
    monkeypatch.setattr("fedstride.oracle.TRIES", 2)
    monkeypatch.setattr("fedstride.oracle.trace", lambda *given: (_ for _ in ()).throw(RuntimeError("no")))
    assert torch.equal(plain.x, run(small_network(), clients, backend="vmap").x)


def test_a_trace_that_gives_other_bits_is_not_used(monkeypatch):
    clients, _ = digits()
    plain, asked = run(small_network(), clients, backend="vmap"), []

    def wrong(function, tensors, rows):
        def forward(*tensors):
            asked.append(len(tensors[0]))
            loss, g = function(*tensors)
            return loss, g * (1 + 1e-15)

        return SimpleNamespace(forward=forward)

    monkeypatch.setattr("fedstride.oracle.TRIES", 2)
    monkeypatch.setattr("fedstride.oracle.trace", wrong)
    assert torch.equal(plain.x, run(small_network(), clients, backend="vmap").x)
    assert len(asked) == 1


@pytest.mark.parametrize("backend", ["sequential", "vmap", "compiled"])
@pytest.mark.parametrize("local", [Local(), Local(weight_decay=0.2, clip=0.5)], ids=["plain", "decay and clip"])
@pytest.mark.parametrize(("size", "sampling"), [(5, "replacement"), (5, "shuffle"), (None, "replacement")])
def test_first_gradients_are_those_a_carry_collects(backend, local, size, sampling, monkeypatch):
    """Nothing else changes: neither what the steps draw nor where they end nor their losses."""
    monkeypatch.setattr(oracles, "PLAIN", 0)
    monkeypatch.setattr(torch, "compile", lambda function, options: function)
    clients, _ = digits()
    clients = clients.to(torch.device("cpu"), torch.float64)
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.3), nn.Linear(8, 10)]
    vector = VectorModel(nn.Sequential(*layers), torch.float64)
    each = (fs.losses.cross_entropy.each, "mean")
    steps = np.array([6, 4, 4, 3, 1, 1])
    jobs = Jobs(np.arange(6), 0 * steps, 0 * steps, steps, steps, 0.05 * steps, 1 + 0 * steps)
    keys = job_keys(0, "train", *jobs[:3], torch.device("cpu"))
    shift = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None].expand(-1, len(vector.x)) / 10

    def collect(g, y, carry, shift):
        k, first = carry
        return g + shift, (k + 1, torch.where(k == 0, g, first))

    def work(name):
        oracle = oracles.make(name, vector, fs.losses.cross_entropy, each)
        return Work(oracle, Sampler(clients, size, sampling), jobs, keys, local)

    with torch.no_grad():
        one, other = work(backend), work("vmap")
        y, first = one.descend(vector.x[None], shifted, rows=(shift,), first=True)
        start = (other.column(), other.zeros(vector.x[None]))
        expected, (_, collected) = other.descend(vector.x[None], collect, rows=(shift,), carry=start)
    torch.testing.assert_close(first, collected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(one.train_loss, other.train_loss, rtol=1e-10, atol=1e-12)
    assert (one.evaluations == steps).all()


@pytest.mark.parametrize("backend", ["sequential", "vmap", "compiled"])
@pytest.mark.parametrize(("lr", "method"), [(1e-3, "fedavg"), (0.3, "fedavg"), (1e-3, "scaffold"), (1e-3, "fedagrac")])
def test_bfloat16_is_float32_with_rounded_gradients(backend, lr, method, monkeypatch):
    """And not with rounded weights: steps smaller than what bfloat16 tells apart are not lost."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "compile", lambda function, options: function)
    clients, test = digits()
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 10))
    start = VectorModel(model, torch.float32).x
    options = dict(method=method, lr=lr, test=test, backend=backend)
    exact, rounded = (run(model, clients, dtype=dtype, **options) for dtype in (torch.float32, torch.bfloat16))
    assert rounded.x.dtype == rounded.model[0].weight.dtype == torch.float32
    assert not torch.equal(exact.x, rounded.x)
    assert (rounded.x - exact.x).norm() < 3e-2 * (exact.x - start).norm()
    small = (exact.x - start).abs().median() < 2**-9 * start.abs().median()  # half of bfloat16's last place
    assert small == (lr < 0.1)
    assert abs(rounded.rows[-1]["loss"] - exact.rows[-1]["loss"]) < 1e-2


@pytest.mark.parametrize("backend", ["sequential", "vmap"])
def test_bfloat16_with_frozen_layers_and_real_targets(backend):
    torch.manual_seed(0)
    clients = fs.Clients.from_arrays([(torch.randn(9, 4), 1 + torch.rand(9) / 1000) for _ in range(3)])
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    model[0].requires_grad_(False)
    options = dict(loss=fs.losses.least_squares, steps=2, backend=backend)
    exact, rounded = (run(model, clients, dtype=dtype, **options) for dtype in (torch.float32, torch.bfloat16))
    assert 0 < (rounded.x - exact.x).abs().max() < 1e-2
    kept = clients.to(CPU, torch.bfloat16)
    assert torch.equal(kept.targets, clients.targets) and torch.equal(kept.inputs, clients.inputs)


def test_bfloat16_does_not_look_like_mixing_examples():
    torch.manual_seed(0)
    vector = VectorModel(nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10)), torch.bfloat16)
    vector.probe(torch.randn(7, 300))
    assert not vector.mixes_examples
