"""What is said about several runs, against hand calculations, closed forms and scipy."""

import math

import numpy as np
import pytest
import torch
from problems import digits

import fedstride as fs
from fedstride.statistics import Run, compare, curve, lower_is_better, sign_flip, student, summarise, to_target

T1 = math.tan(math.pi * 0.475)  # the 97.5 % quantiles of one and two degrees of freedom, in closed form
T2 = math.sqrt(2 * 0.95**2 / (1 - 0.95**2))


def rows(values, metric="accuracy", seconds=1.0, up=1_000_000, down=500_000, steps=10):
    """One row a round; None is a round without evaluation."""
    table = []
    for number, value in enumerate(values, 1):
        row = {"round": number, "seconds": seconds * number, "bytes_up": up, "bytes_down": down, "steps": steps}
        table.append(row | ({} if value is None else {metric: value}))
    return table


def runs(*finals, metric="accuracy"):
    """Runs of two rounds with seeds from 0; None diverged."""
    return [
        Run(seed, rows([0.1, None], metric), "diverged") if final is None else Run(seed, rows([0.1, final], metric))
        for seed, final in enumerate(finals)
    ]


# Means and intervals


def test_interval_by_hand():
    got = summarise(runs(0.90, 0.92, 0.94))
    assert got.mean == pytest.approx(0.92, abs=1e-15)
    assert got.half == pytest.approx(T2 * 0.02 / math.sqrt(3), rel=1e-12)
    assert (got.n, got.diverged) == (3, 0)
    assert got.text(100) == "92.0 +- 5.0" and str(got) == "0.920 +- 0.050"


def test_one_run_has_no_interval():
    got = summarise(runs(0.9))
    assert (got.mean, got.half, got.n) == (0.9, None, 1)
    assert got.text(100) == "90 (n = 1, no interval)"


def test_diverged_runs_are_named_not_averaged():
    got = summarise(runs(0.9, None, 0.8))
    assert got.mean == pytest.approx(0.85) and (got.n, got.diverged) == (2, 1)
    assert got.text(100) == "85 +- 64, 1 of 3 diverged"
    assert summarise(runs(None, None)).text() == "all 2 diverged"
    assert summarise(runs(None)).text() == "diverged"
    assert summarise([Run(0, rows([0.3, math.inf], "loss")), *runs(0, 1.0, metric="loss")[1:]], "loss").diverged == 1


def test_costs_and_errors_are_better_small():
    small = ("seconds", "steps", "bytes_up", "rejected", "staleness", "loss", "train_loss", "error", "penalty")
    assert all(lower_is_better(name) for name in small)
    assert not any(lower_is_better(name) for name in ("accuracy", "top5", "parity_accuracy"))


def test_best_is_high_for_accuracy_and_low_for_losses():
    for metric, best in (("accuracy", 0.9), ("top5", 0.9), ("loss", 0.2), ("train_loss", 0.2)):
        run = [Run(0, rows([0.5, 0.9, math.nan, 0.2, None, 0.4], metric))]
        assert summarise(run, metric, "best").mean == best
        assert summarise(run, metric).mean == 0.4


def test_equal_values_have_a_zero_interval():
    assert summarise(runs(0.1, 0.1, 0.1)).text() == "0.1 +- 0"


def test_intervals_cover_as_often_as_they_say():
    """4,000 means of four normal values, to three standard errors; with the normal quantile it would be 85 %."""
    values = np.random.default_rng(0).normal(size=(4, 4_000))
    got = curve([Run(seed, rows(line)) for seed, line in enumerate(values)])
    assert (np.abs(got.mean) <= got.half).mean() == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 4_000))


# Student's t and the sign flips


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 19, 100, 10_000])
def test_student_against_scipy(df):
    stats = pytest.importorskip("scipy.stats")
    for t in (0.0, 1e-6, 0.1, 0.7, 1.0, 2.0, 4.3, 12.7, 60.0):
        expected = 2 * stats.t.sf(t, df)
        assert student(t, df) == pytest.approx(expected, rel=1e-10, abs=1e-300)
        assert student(-t, df) == student(t, df)
    if df < 1000:
        values = np.random.default_rng(df).normal(size=df + 1)
        low, high = stats.t.interval(0.95, df, values.mean(), stats.sem(values))
        got = summarise(runs(*values))
        assert (got.mean - got.half, got.mean + got.half) == pytest.approx((low, high), rel=1e-10)


def test_student_closed_forms():
    for t in (0.3, 1.0, 5.0, 40.0):
        assert student(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-12)
        assert student(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-11)
    assert student(0, 5) == 1 and student(math.inf, 5) == 0


def test_sign_flips_by_hand():
    assert sign_flip([1, 1, 1]) == 2 / 8  # all signs equal: the two extremes
    assert sign_flip([1, 2, -4]) == 1.0  # |sum| = 1 is the smallest possible
    assert sign_flip([3, 2, -1]) == 4 / 8  # |sum| = 4; +-6, +-4 reach it
    assert sign_flip([0.1, 0.2, -0.3]) == 1.0  # zero but for rounding
    assert sign_flip([0.0, 0.0]) == 1.0


def test_sign_flips_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    for n in (4, 9, 14):
        d = np.random.default_rng(n).normal(0.3, 1, n)
        expected = stats.permutation_test((d,), np.sum, permutation_type="samples", n_resamples=np.inf).pvalue
        assert sign_flip(d) == pytest.approx(expected, rel=1e-12)


def test_sampled_sign_flips_are_near_the_exact_ones_and_repeat():
    d = [1.0] * 12 + [-1.0] * 4  # exact: a sum of at least 8 in either direction
    exact = 2 * sum(math.comb(16, k) for k in range(5)) / 2**16
    assert sign_flip(d) == pytest.approx(exact, abs=4 * math.sqrt(exact / 2**14))
    assert sign_flip(d) == sign_flip(d)
    assert 0 < sign_flip([1.0] * 60) < 1e-3


# Comparisons


def test_comparison_by_hand():
    got = compare(runs(0.9, 0.8, 0.9), runs(0.8, 0.6, 0.6))
    assert got.differences == pytest.approx((0.1, 0.2, 0.3))
    assert got.mean == pytest.approx(0.2) and got.effect == pytest.approx(2.0)  # deviation 0.1
    assert got.half == pytest.approx(T2 * 0.1 / math.sqrt(3), rel=1e-10)
    assert got.p_t == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-10)  # t = 2 sqrt 3, two degrees
    assert (got.p_flip, got.wins, got.losses, got.seeds, got.left_out) == (0.25, 3, 0, (0, 1, 2), ())
    assert got.text(100) == (
        "difference 20 +- 25; 3 won and 0 lost of 3 common seeds; d = 2, p = 0.074 (paired t test); "
        "p = 0.25 (sign flips, at least 0.25 for 3 pairs)"
    )


def test_comparison_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    a, b = np.random.default_rng(1).normal(size=(2, 8))
    got, expected = compare(runs(*a), runs(*b)), stats.ttest_rel(a, b)
    assert got.p_t == pytest.approx(expected.pvalue, rel=1e-10)
    assert got.effect * math.sqrt(8) == pytest.approx(expected.statistic, rel=1e-10)
    interval = expected.confidence_interval(0.95)
    assert (got.mean - got.half, got.mean + got.half) == pytest.approx((interval.low, interval.high), rel=1e-10)


def test_a_lower_loss_wins():
    got = compare(runs(0.2, 0.3, 0.5, metric="loss"), runs(0.4, 0.4, 0.4, metric="loss"), "loss")
    assert (got.wins, got.losses) == (2, 1) and got.mean == pytest.approx(-0.2 / 3)


def test_only_common_seeds_count_and_pairs_go_by_seed():
    one, two = runs(0.9, 0.8, 0.7, 0.6), list(reversed(runs(0.8, 0.7)))
    two.append(Run(9, rows([0.1, 0.2])))
    got = compare(one, two)
    assert got.seeds == (0, 1) and got.left_out == (2, 3, 9)
    assert got.differences == pytest.approx((0.1, 0.1))
    assert got.effect == math.inf and got.p_t == 0 and got.p_flip == 0.5
    assert "2 common seeds; left out seeds 2, 3, 9; the same on every seed, of which" in got.text()


def test_diverged_runs_lose_but_make_no_difference():
    got = compare(runs(0.9, None, 0.7, None), runs(0.8, 0.1, None, None))
    assert got.differences == pytest.approx((0.1,)) and (got.wins, got.losses) == (2, 1)
    assert got.half is got.effect is got.p_t is got.p_flip is None
    assert got.text(100) == (
        "difference 10 (n = 1, no interval); 2 won and 1 lost of 4 common seeds; on 3 of them a run diverged"
    )
    assert compare(runs(None), runs(0.5)).text().startswith("no difference to give; 0 won and 1 lost of 1 common seed")


def test_a_method_against_itself():
    got = compare(runs(0.9, 0.8), runs(0.9, 0.8))
    assert (got.mean, got.effect, got.p_t, got.p_flip, got.wins, got.losses) == (0, 0, 1, 1, 0, 0)


# Curves


def test_curve_over_rounds():
    got = curve([Run(0, rows([0.1, 0.3, 0.5])), Run(1, rows([0.3, 0.5, 0.9]))])
    assert got.at.tolist() == [1, 2, 3] and got.mean == pytest.approx([0.2, 0.4, 0.7])
    # The standard error of two values is half their distance.
    assert got.half == pytest.approx([T1 * 0.1, T1 * 0.1, T1 * 0.2], rel=1e-10)


def test_curves_are_steps_on_the_common_stretch():
    fast, slow = Run(0, rows([0.1, 0.2, 0.3, 0.4], seconds=1.0)), Run(1, rows([0.5, 0.7], seconds=1.5))
    got = curve([fast, slow], against="seconds")
    assert got.at.tolist() == [1.5, 2, 3]  # slow starts at 1.5 and ends at 3
    assert got.mean == pytest.approx([(0.1 + 0.5) / 2, (0.2 + 0.5) / 2, (0.3 + 0.7) / 2])
    own = curve([fast, slow], against="seconds", grid=[1.0, 2.9, 3.5])
    assert own.mean == pytest.approx([math.nan, (0.2 + 0.5) / 2, math.nan], nan_ok=True)


def test_curve_against_traffic_and_steps_counts_every_row():
    run = Run(0, [{"round": 0, "seconds": 0, "bytes_up": 7e6, "bytes_down": 0, "steps": 0}, *rows([None, 0.4, 0.6])])
    assert curve([run], against="megabytes").at.tolist() == [7 + 3, 7 + 4.5]
    assert curve([run], against="steps").at.tolist() == [20, 30]
    assert np.isnan(curve([run]).half).all()


def test_rows_at_the_same_moment_show_the_last():
    run = Run(0, [*rows([0.1], seconds=2.0), *rows([0.3], seconds=2.0)])
    assert curve([run], against="seconds").mean.tolist() == [0.3]


def test_diverged_runs_are_not_in_the_curve():
    got = curve([*runs(0.5, None), Run(2, rows([0.2, math.nan, 0.4]))])
    assert (got.n, got.diverged) == (1, 2) and got.mean.tolist() == [0.1, 0.5]


# The way to a target


def finishing(*hits, length=10, metric="accuracy"):
    """Runs that meet 0.8 in that round; None: never."""
    return [
        Run(seed, rows([0.9 if number == hit else 0.1 for number in range(1, length + 1)], metric))
        for seed, hit in enumerate(hits)
    ]


HIGH = fs.Target(accuracy=0.8)


def test_all_reached():
    got = to_target(finishing(9, 6, 7), HIGH)
    assert (got.median, got.mean, got.reached, got.n) == (7, pytest.approx(22 / 3), [6, 7, 9], 3)
    assert got.text() == "7 (6-9)"
    assert to_target(finishing(4), HIGH).text() == "4"


def test_censored_runs_count_as_larger_and_forbid_a_mean():
    got = to_target(finishing(9, None, 6), HIGH)
    assert (got.median, got.mean) == (9, None)
    assert got.text() == "9 (6-9), 2 of 3 reached"
    assert [run.text() for run in got.runs] == ["9", "> 10", "6"]


@pytest.mark.parametrize(
    "hits, words",
    [
        ((None, None, 6), "> 10 (6), 1 of 3 reached"),
        ((6, 9, None, None), "> 10 (6-9), 2 of 4 reached"),
        ((6, 8, 9, None), "8.5 (6-9), 3 of 4 reached"),
        ((None, None, None), "> 10, 0 of 3 reached"),
        ((None,), "> 10, 0 of 1 reached"),
    ],
)
def test_the_median_may_be_censored(hits, words):
    got = to_target(finishing(*hits), HIGH)
    assert got.text() == words and math.isinf(got.median) == words.startswith(">")


def test_diverged_runs_are_said_to_be():
    broken = [Run(seed, rows([0.1, 0.2, None]), "diverged") for seed in (7, 8)]
    got = to_target([*finishing(6), *broken], HIGH)
    assert got.text() == "diverged (6), 1 of 3 reached, 2 diverged"
    assert got.runs[1].text() == "diverged at 3" and got.mean is None
    assert to_target([*finishing(6, 4, None), broken[0]], HIGH).text() == "> 10 (4-6), 2 of 4 reached, 1 diverged"
    # Diverging after the target was met does not take it back.
    assert to_target([Run(0, rows([0.9, None]), "diverged")], HIGH).text() == "1"


def test_the_first_row_counts_in_every_unit():
    run = Run(0, [{"round": 0, "seconds": 2.0, "bytes_up": 3e6, "bytes_down": 0, "steps": 1}, *rows([0.1, 0.8, 0.9])])
    found = {unit: to_target([run], HIGH, unit).median for unit in ("rounds", "seconds", "megabytes", "steps")}
    assert found == {"rounds": 2, "seconds": 2.0, "megabytes": 3 + 2 * 1.5, "steps": 1 + 20}


def test_losses_can_be_targets():
    run = [Run(0, rows([0.9, 0.4, 0.3], "loss"))]
    assert to_target(run, fs.Target(loss=0.4)).median == 2


def test_runs_that_ended_at_different_times_bound_the_median_by_the_first():
    early = Run(5, rows([0.1] * 4), "stopped")
    assert to_target([early, *finishing(None, None)], HIGH).text() == "> 4, 0 of 3 reached"


@pytest.mark.parametrize(
    "value, words", [(1234.0, "1,234"), (999.96, "1,000.0"), (26.39, "26.4"), (0.0123, "0.0123"), (152.5, "152.5")]
)
def test_numbers_for_people(value, words):
    assert to_target([Run(0, rows([0.9], seconds=value))], HIGH, "seconds").text() == words


# From a simulation to a sentence, and mistakes


def test_real_runs():
    clients, test = digits()
    found = []
    for seed in range(3):
        model = fs.models.make("mlp", seed=seed)
        settings = dict(rounds=3, steps=4, lr=0.1, test=test, seed=seed, world=fs.World(devices=0.1), device="cpu")
        result = fs.simulate("fedavg", model, clients, dtype=torch.float64, **settings)
        found.append(Run(seed, result.rows, result.status))
    got = summarise(found)
    assert got.mean == pytest.approx(np.mean([run.rows[-1]["accuracy"] for run in found]))
    assert curve(found, against="seconds").at == pytest.approx([0.4, 0.8, 1.2])
    assert to_target(found, fs.Target(accuracy=0.0), "steps").text() == "24 (24)"
    assert to_target(found, fs.Target(accuracy=1.0)).text() == "> 3, 0 of 3 reached"
    per_round = 2 * 6 * 8 * (64 * 64 + 64 + 640 + 10) / 1e6
    assert to_target(found, fs.Target(loss=1e9), "megabytes").median == pytest.approx(per_round)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: summarise([]), "there are no runs"),
        (lambda: summarise([Run(0, [])]), "seed 0 has no rows"),
        (lambda: summarise(runs(0.5) + runs(0.6)), "seed 0 appears 2 times"),
        (lambda: summarise([Run(3, rows([0.5]), "running")]), "seed 3 has status 'running'; known are finished"),
        (lambda: summarise(runs(0.5), "loss"), "seed 0 has no 'loss'; its rows have accuracy, bytes_down"),
        (lambda: summarise(runs(0.5), pick="last"), "pick must be 'final' or 'best', not 'last'"),
        (lambda: compare(runs(0.5), [Run(4, rows([0.1]))]), r"no seed in common: \[0\] and \[4\]"),
        (lambda: curve(runs(0.5), against="hours"), "unknown unit 'hours'; choose from rounds, seconds"),
        (lambda: curve(runs(None, None)), "all 2 runs diverged, so there is no curve of accuracy"),
        (lambda: to_target(runs(0.5), 0.8), r"target must be a Target, such as fs\.Target"),
        (lambda: to_target(runs(0.5), fs.Target(loss=1.0)), "seed 0 has no 'loss'"),
        (lambda: to_target([Run(0, rows([0.1], seconds=0.0))], HIGH, "seconds"), "seed 0 took no virtual time"),
    ],
)
def test_mistakes_are_answered_in_words(wrong, words):
    with pytest.raises(fs.FedstrideError, match=words) as error:
        wrong()
    assert "\n" not in str(error.value)
