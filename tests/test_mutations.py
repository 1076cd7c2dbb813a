"""Deliberate faults, the ones found in public libraries among them: each must be caught by the conformance checks."""

import conformance
import numpy as np
import pytest
import torch
from conformance import HALF, UNEVEN, make
from problems import STEPS, Quadratics
from test_asynchronous import test_fedbuff_and_fedasync_by_hand as check_by_hand

import fedstride as fs
from fedstride import checkpoint, train
from fedstride.algorithms import FedAvg, Scaffold
from fedstride.clock import Clock
from fedstride.replies import Replies
from fedstride.sampling import Sampler

Simulator = fs.simulate.__globals__["Simulator"]


def caught(check, *arguments, **settings):
    with pytest.raises(AssertionError):
        check(*arguments, **settings)


def check_fedavg_point():
    problem = Quadratics()
    point = problem.balance([0.15 * problem.path(0.15, k, a) for k, a in zip(STEPS, problem.a)])
    assert problem.distance(problem.run(FedAvg(), rounds=40), point) < 1e-10


def test_the_checks_pass_without_a_fault():
    conformance.check_exact(make("scaffold"))
    conformance.check_resume(make("scaffold"))
    conformance.check_rejection(make("scaffold"))
    conformance.check_batches_differ()
    check_fedavg_point()


def test_control_variate_never_written_back(monkeypatch):
    monkeypatch.setattr(Simulator, "keep", lambda self, answers, used: None)
    caught(conformance.check_exact, make("scaffold"))


def test_correction_never_applied(monkeypatch):
    descend = train.Work.descend
    monkeypatch.setattr(train.Work, "descend", lambda self, x, direction=None, rows=(), **more: descend(self, x))
    caught(conformance.check_exact, make("scaffold"))


def test_model_and_control_variates_weighted_differently(monkeypatch):
    def uniform(self, field):
        return self.rows(field).sum(0) / len(self._weights)

    monkeypatch.setattr(Scaffold, "needs_rows", True)
    monkeypatch.setattr(Replies, "total", uniform)
    caught(conformance.check_exact, make("scaffold"))


def test_share_of_the_fleet_instead_of_fleet_weights(monkeypatch):
    monkeypatch.setattr(Replies, "total", lambda self, field: len(self) / len(self._weights) * self.mean(field))
    conformance.check_exact(make("scaffold"))  # with everyone it is the same, which is why nobody notices
    caught(conformance.check_exact, make("scaffold"), participation=HALF, rounds=160)


def test_server_state_lost_on_resume(monkeypatch):
    restore = checkpoint.restore

    def only_the_model(skeleton, tensors, device, like=None):
        return like._replace(x=tensors["state.0"]) if like else restore(skeleton, tensors, device)

    monkeypatch.setattr(checkpoint, "restore", only_the_model)
    caught(conformance.check_resume, make("scaffold"))


def test_client_memories_lost_on_resume(monkeypatch):
    monkeypatch.setattr(fs.memory.Memories, "load", lambda self, clients, tables: None)
    caught(conformance.check_resume, make("scaffold"))


def test_memory_kept_from_a_rejected_upload(monkeypatch):
    keep = Simulator.keep
    monkeypatch.setattr(Simulator, "keep", lambda self, answers, used: keep(self, answers, np.ones_like(used)))
    caught(conformance.check_rejection, make("scaffold"))


def test_everybody_does_as_many_steps_as_the_longest(monkeypatch):
    monkeypatch.setattr(train, "active", lambda steps: [len(steps)] * int(steps[0]))
    caught(check_fedavg_point)


def test_the_same_batch_twice(monkeypatch):
    batches = Sampler.batches
    monkeypatch.setattr(
        Sampler, "batches", lambda self, jobs, keys, first, last: [batches(self, jobs, keys, 0, 1)[0]] * (last - first)
    )
    caught(conformance.check_batches_differ)


def test_rows_leak_when_the_prefix_shrinks(monkeypatch):
    sliced = train.cut

    def shifted(tree, rows, whole):
        if (
            isinstance(tree, torch.Tensor)
            and tree.dim() == 2
            and tree.shape[1] > 1
            and rows.start == 0
            and rows.stop < whole
        ):
            return tree[whole - rows.stop :]
        if isinstance(tree, tuple):
            parts = [shifted(part, rows, whole) for part in tree]
            return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
        return sliced(tree, rows, whole)

    monkeypatch.setattr(train, "cut", shifted)
    caught(check_fedavg_point)


def test_only_the_correction_rows_leak(monkeypatch):
    """The subtler form: the iterate is sliced rightly, the per-client correction is not."""
    descend = train.Work.descend

    def leaking(self, x, direction=None, rows=(), **more):
        if direction is None:
            return descend(self, x, **more)
        return descend(
            self, x, lambda g, y, *parts: direction(g, y, *(row[-len(y) :] for row in rows)), rows=rows, **more
        )

    monkeypatch.setattr(train.Work, "descend", leaking)
    caught(conformance.check_exact, make("scaffold"))


BUFFERED = dict(schedule=fs.schedule.Buffered(concurrency=4, size=2), world=UNEVEN, lr=0.1, rounds=250)


def check_fedbuff_is_fedavg():
    problem, settings = Quadratics(), dict(rounds=10, weights="data", steps=3, world=fs.World(devices=0.1))
    buffered = problem.run(fs.algorithms.FedBuff(n=6), **settings)
    torch.testing.assert_close(buffered.x, problem.run("fedavg", **settings).x, rtol=1e-12, atol=1e-12)


def test_the_asynchronous_checks_pass_without_a_fault():
    conformance.check_exact(make("scaffold"), **BUFFERED)
    conformance.check_resume_anywhere(make("fedbuff"))
    conformance.check_replay(make("fedbuff"))
    check_fedbuff_is_fedavg()


def test_dispatches_before_arrivals(monkeypatch):
    push = Clock.push
    monkeypatch.setattr(Clock, "push", lambda self, time, priority, *event: push(self, time, -priority, *event))
    caught(check_fedbuff_is_fedavg)


def test_every_job_starts_from_the_newest_model(monkeypatch):
    train_ahead = Simulator._train_ahead

    def newest(self, exchange, course, number):
        self._messages = dict.fromkeys(self._messages, self._messages[course.version])
        train_ahead(self, exchange, course, number)

    monkeypatch.setattr(Simulator, "_train_ahead", newest)
    caught(check_by_hand)


def test_memories_written_back_after_the_next_job_was_trained(monkeypatch):
    """Replies handed over only when the server acts: a client that is back at work by then has an old memory."""
    late = []
    keep = Simulator.keep

    def delayed(self, answers, used):
        late.append((answers, used))
        if len(late) > 2:
            keep(self, *late.pop(0))

    monkeypatch.setattr(Simulator, "keep", delayed)
    caught(conformance.check_exact, make("scaffold"), **BUFFERED)


@pytest.mark.parametrize("part", ["contents", "messages"])
def test_results_or_models_lost_on_resume(monkeypatch, part):
    dump = Simulator.dump

    def without(self):
        stored = dump(self)
        if part == "contents":
            return stored | {"contents": ()}
        return stored | {"messages": tuple((v, self._messages[max(self._messages)]) for v in self._messages)}

    monkeypatch.setattr(Simulator, "dump", without)
    with pytest.raises((AssertionError, KeyError)):  # the models of results that are lost are gone, too
        conformance.check_resume_anywhere(make("fedbuff"), steps=3)


def test_the_clock_starts_again_on_resume(monkeypatch):
    load = Clock.load
    monkeypatch.setattr(Clock, "load", lambda self, stored: load(self, stored | {"now": 0.0}))
    caught(conformance.check_resume_anywhere, make("dlsgd-homo"))


def test_a_discount_normalised_away(monkeypatch):
    mean = Replies.mean
    monkeypatch.setattr(Replies, "mean", lambda self, field: mean(self, field) / float(self.discount))

    def check():
        problem, settings = Quadratics(), dict(rounds=20, world=UNEVEN, steps=2)
        one = problem.run(fs.algorithms.FedBuff(n=1, staleness="polynomial", exponent=2.0), **settings)
        two = problem.run(fs.algorithms.FedBuff(n=1), **settings)
        assert not torch.allclose(one.x, two.x)

    caught(check)
