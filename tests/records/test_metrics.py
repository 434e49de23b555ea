"""The figures of a report, on numbers worked out by hand."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import asdict

from fedkeep.core.errors import MissingExtraError
from fedkeep.records import End, Evaluation, GistLine, Header, Line, Round, Run, compare, frame
from fedkeep.records.measures import (
    best_accuracy,
    coverage,
    difference,
    final_accuracy,
    has_diverged,
    interval,
    late_accuracy,
    mean_accuracy,
    pooled,
    quantile,
    rounds_to,
)
from fedkeep.records.tables import (
    as_csv,
    as_text,
    explanation,
    latex,
    markdown,
    sentences,
    tables,
)


def run(
    method: str,
    seed: int,
    curve: Mapping[int, float | None],
    *,
    finished: bool = True,
    setting: str = "",
) -> Run:
    header = Header(
        run=f"{method}-{seed}{setting}",
        method=method,
        task="toy",
        seed=seed,
        setting=setting,
        config={},
        config_hash="",
        versions={},
        labels=(),
        devices=1,
    )
    lines: list[Line] = [
        header,
        *(
            Evaluation(round=r, accuracy=a, loss=None if a is None else 0.5)
            for r, a in curve.items()
        ),
    ]
    if finished:
        lines.append(End(round=max(curve, default=0), digest=""))
    return Run(Path(f"{header.run}.jsonl"), header, tuple(lines))


FIFO: dict[int, float | None] = {0: 0.1, 20: 0.4, 40: 0.5, 60: 0.6, 80: 0.7, 100: 0.6, 120: 0.6}
"""Its last five are 0.5, 0.6, 0.7, 0.6, 0.6: a final accuracy of 0.6, first reached at round 60."""


def test_late_accuracy_is_the_mean_of_the_last_five() -> None:
    assert late_accuracy(run("fifo", 0, FIFO).evaluations) == pytest.approx(0.6)
    assert late_accuracy(run("fifo", 0, {1: 0.2, 2: 0.4}).evaluations) == pytest.approx(0.3)
    assert late_accuracy(run("fifo", 0, {1: None, 2: 0.4}).evaluations) == pytest.approx(0.2)
    assert late_accuracy(run("fifo", 0, {0: 0.1, 20: 0.6, 40: 0.8}).evaluations) == pytest.approx(
        0.7
    )
    assert late_accuracy(run("fifo", 0, {0: 0.1}).evaluations) == pytest.approx(0.1)


def test_final_best_and_mean_accuracy_are_what_they_are_called() -> None:
    evaluations = run("fifo", 0, FIFO).evaluations
    assert (final_accuracy(evaluations), best_accuracy(evaluations)) == (0.6, 0.7)
    # trapezia of 20 rounds each: .25 + .45 + .55 + .65 + .65 + .6 over 6
    assert mean_accuracy(evaluations) == pytest.approx(3.15 / 6)
    uneven = run("fifo", 0, {0: 0.0, 10: 1.0, 40: 1.0}).evaluations
    assert mean_accuracy(uneven) == pytest.approx((5 + 30) / 40)
    assert mean_accuracy(uneven[:1]) == 0.0
    assert best_accuracy(run("fifo", 0, {0: 0.9, 10: 0.5, 20: None}).evaluations) == 0.5


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.02, 0.03, 0.04], "better"),
        ([-0.02, -0.03, -0.04], "worse"),
        ([0.001, -0.001, 0.0], "equivalent"),
        ([0.05, -0.03, 0.01], "inconclusive"),
        ([0.5], "inconclusive"),
    ],
)
def test_a_verdict_follows_from_the_interval(values: list[float], verdict: str) -> None:
    assert difference(values).verdict == verdict


def test_two_seeds_that_differ_alike_decide_nothing() -> None:
    found = difference([0.0667, 0.0667])
    assert (found.verdict, found.seeds_to_decide) == ("inconclusive", 3)
    assert difference([0.0667, 0.0667, 0.0667]).verdict == "better"
    assert difference([0.0, 0.0]).verdict == "equivalent"


def test_the_seeds_that_would_decide_are_counted() -> None:
    found = difference([0.03, 0.01, -0.01])
    # deviation 0.02, mean 0.01: t(n-1) * 0.02 / sqrt(n) < 0.01 first for 18 seeds (t = 2.1098)
    assert (found.verdict, found.seeds_to_decide) == ("inconclusive", 18)
    assert difference([0.02, 0.03, 0.04]).seeds_to_decide is None
    assert difference([0.5]).seeds_to_decide is None


def test_differences_pair_seeds_and_compare_as_far_as_both_got() -> None:
    runs = [
        run("fifo", 0, {0: 0.1, 10: 0.4, 20: 0.8}),
        run("fifo", 1, {0: 0.1, 10: 0.2}),
        run("fifo", 2, {0: 0.1}),
    ]
    runs += [
        run("ode", 0, {0: 0.1, 10: 0.5}),
        run("ode", 1, {0: 0.1, 10: 0.4}),
        run("ode", 3, {0: 0.9}),
    ]
    fifo, ode = compare(runs, ["fifo"]).rows
    assert fifo.differences == (None,)
    assert ode.differences[0] is not None
    final = ode.differences[0]["final"]
    assert (final.seeds, final.mean) == (2, pytest.approx(0.15))
    assert final.half_width == pytest.approx(12.7062 * 0.070711 / math.sqrt(2), rel=1e-4)


def test_the_verdict_is_given_in_words() -> None:
    base = [run("fifo", seed, {10: 0.5}) for seed in range(3)]
    better = [run("ode", seed, {10: 0.6 + seed / 100}) for seed in range(3)]
    alike = [run("sld", seed, {10: 0.5}) for seed in range(3)]
    open_ = [run("high-loss", seed, {10: 0.53 - seed / 50}) for seed in range(3)]
    assert sentences(compare([*base, *better, *alike, *open_])) == [
        "ode is better than fifo by 11.00 ± 2.48 points on toy.",
        "high-loss against fifo is inconclusive on toy (+1.00 ± 4.97 points): "
        "about 18 seeds would decide it.",
        "sld is equivalent to fifo within a point on toy.",
    ]
    assert "one seed decides nothing" in sentences(compare([base[0], better[0]]))[0]


def test_numbers_are_judged_by_r2_and_their_errors_stand_beside_it() -> None:
    def number_run(method: str, seed: int, r2: float, rmse: float) -> Run:
        plain = run(method, seed, {0: -1.0, 10: r2})
        header = structs.replace(plain.header, measure="r2", labels=("below 5", "5 and more"))
        lines = [
            structs.replace(line, rmse=rmse, mae=rmse / 2, label_recall=(r2, None))
            if isinstance(line, Evaluation)
            else line
            for line in plain.lines[1:]
        ]
        return Run(plain.path, header, (header, *lines))

    runs = [number_run("fifo", seed, 0.5 + seed / 100, 14.0 + seed) for seed in range(3)]
    runs += [number_run("ode", seed, 0.6 + seed / 100, 12.0 + seed) for seed in range(3)]
    comparison = compare(runs)
    fifo, ode = comparison.rows
    assert ode.measure == "r2"
    assert ode.errors["rmse"].mean == 13.0
    # The lower error is the better one: the verdict follows R2, whose direction is accuracy's.
    assert ode.differences[0] is not None
    assert ode.differences[0]["final"].verdict == "better"
    assert ode.errors["rmse"].mean < fifo.errors["rmse"].mean
    methods, worst, *_ = tables(comparison, full=True)
    assert methods.columns == ("method", "seeds", "final R2", "best", "mean R2", "RMSE", "MAE")
    assert methods.rows[1][5:] == ("13 ± 2.5", "6.5 ± 1.2")
    assert worst.title == "toy: R2 of each interval"
    assert explanation(comparison).startswith("Targets are numbers: R2")
    lost = [number_run("fifo", 0, -1.0, 90.0), number_run("ode", 0, 0.4, 12.0)]
    assert compare(lost).rows[1].ratios[0].value is None, "the worst score sets no target"
    assert "R2" not in explanation(compare([run("fifo", 0, {10: 0.5})]))


def test_every_evaluation_is_a_row() -> None:
    table = as_csv([run("ode", 3, {0: 0.1, 10: None}, finished=False)])
    assert table.splitlines()[1:] == [
        "toy,,ode,3,0,0.1,0.5,0,0,0,0,,,0,,,,,,False",
        "toy,,ode,3,10,,,0,0,0,0,,,0,,,,,,False",
    ]


def test_a_frame_has_the_rows() -> None:
    pytest.importorskip("pandas")
    table = frame([run("ode", seed, FIFO) for seed in range(2)])
    assert table.groupby("seed")["accuracy"].max().tolist() == [0.7, 0.7]
    assert list(table.columns[:5]) == ["task", "setting", "method", "seed", "round"]


def test_a_frame_without_pandas_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"fedkeep\[frame\]"):
        frame([run("ode", 0, FIFO)])


def test_the_first_round_that_reaches_a_target_counts_but_never_round_zero() -> None:
    evaluations = run("fifo", 0, {0: 0.9, 10: 0.5, 20: None, 30: 0.6, 40: 0.7}).evaluations
    assert rounds_to(evaluations, 0.6) == 30
    assert rounds_to(evaluations, 0.8) is None


def test_the_ratio_divides_the_base_rounds_by_the_method_rounds() -> None:
    ode = {r: (a or 0) + 0.25 for r, a in FIFO.items()}
    reservoir: dict[int, float | None] = {0: 0.1, 60: 0.3, 120: 0.35}
    found = compare(
        [run("ode", 0, ode), run("reservoir", 0, reservoir), run("fifo", 0, FIFO)],
        ["fifo", "reservoir"],
    )
    assert [row.method for row in found.rows] == ["fifo", "reservoir", "ode"]
    fifo, slow, fast = (row.ratios for row in found.rows)
    assert (fifo[0].value, fifo[0].reached, fifo[0].seeds) == (1.0, 1, 1)
    assert (slow[0].value, slow[0].reached, slow[0].seeds) == (None, 0, 1)
    assert fast[0].value == pytest.approx(60 / 20)
    assert fast[1].base == "reservoir"
    # reservoir's own target is (0.3 + 0.35) / 2 = 0.325, reached at its round 120
    assert fast[1].value == pytest.approx(120 / 20)


def test_ratios_average_geometrically_over_the_seeds_that_got_there() -> None:
    base: dict[int, float | None] = {8: 0.5, 16: 0.5}
    runs = [run("fifo", seed, base) for seed in range(4)]
    runs += [run("ode", 0, {2: 0.5, 8: 0.5}), run("ode", 1, {8: 0.5}), run("ode", 2, {8: 0.4})]
    row = compare(runs).rows[1]
    assert row.ratios[0].value == pytest.approx(math.sqrt(4 * 1))
    assert (row.ratios[0].reached, row.ratios[0].seeds, row.seeds) == (2, 3, 3)


def test_without_the_base_there_is_no_ratio() -> None:
    ratio = compare([run("ode", 0, FIFO)], ["fifo"]).rows[0].ratios[0]
    assert (ratio.value, ratio.reached, ratio.seeds) == (None, 0, 0)


def test_a_second_table_stands_against_the_base_that_ran() -> None:
    (alone,) = tables(compare([run("ode", 0, FIFO)]))
    assert alone.columns == ("method", "seeds", "final accuracy", "best", "mean accuracy")
    _, against = tables(compare([run("ode", 0, FIFO), run("fifo", 0, FIFO)]))
    assert against.title == "toy: against fifo"
    assert against.rows == (("ode", "inconclusive", "+0.00", "+0.00", "+0.00", "1.00x"),)


def test_what_a_gist_did_is_a_table_of_those_that_have_one() -> None:
    runs = [run("fifo", 0, FIFO), run("gist-local", 0, FIFO)]
    gist_lines = [
        GistLine(round=10 * n, participations=n, trust=0.2 * n, likeness=0.5, worth=30.0, reach=0.1)
        for n in (1, 3)
    ]
    runs[1] = Run(runs[1].path, runs[1].header, (*runs[1].lines, *gist_lines))
    compared = compare(runs)
    assert compared.rows[0].gist == {}
    assert compared.rows[1].gist["trust"].mean == pytest.approx((0.2 + 3 * 0.6) / 4)
    assert list(tables(compared))[-1].rows == (
        ("gist-local", "50.00 %", "50.00 %", "30.0", "10.00 %"),
    )
    assert "| gist-local | 50.00 % |" in markdown(compared)
    assert "the correction weight beta" in explanation(compared)
    assert "gist" not in explanation(compare(runs[:1]))


def test_one_vanishing_gradient_does_not_decide_the_reported_correction_norm() -> None:
    reaches = (0.3, 1e9, 0.5)
    gist_lines = [
        GistLine(round=n, participations=1, trust=1, likeness=1, worth=1, reach=reach)
        for n, reach in enumerate(reaches)
    ]
    assert pooled(gist_lines).reach == 0.5


def test_a_method_is_compared_within_its_setting() -> None:
    slow: dict[int, float | None] = {40: 0.5}
    runs = [run("fifo", 0, slow, setting="small"), run("fifo", 0, {10: 0.5}, setting="large")]
    runs += [run("ode", 0, {20: 0.5}, setting="small"), run("ode", 0, {20: 0.5}, setting="large")]
    found = {(row.setting, row.method): row.ratios[0].value for row in compare(runs).rows}
    assert found[("small", "ode")] == pytest.approx(2.0)
    assert found[("large", "ode")] == pytest.approx(0.5)


def test_the_interval_is_students_t_over_the_seeds() -> None:
    runs = [run("ode", seed, {10: a}) for seed, a in enumerate([0.70, 0.72, 0.74])]
    row = compare(runs).rows[0]
    assert row.measures["late"].mean == pytest.approx(0.72)
    # standard deviation 0.02, t(0.975; 2) = 4.302653
    assert row.measures["late"].half_width == pytest.approx(
        4.302653 * 0.02 / math.sqrt(3), rel=1e-6
    )
    assert compare(runs[:1]).rows[0].measures["late"].half_width is None


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (9, 2.26216),
        (30, 2.04227),
        (120, 1.97993),
    ],
)
def test_quantiles_agree_with_the_printed_table(freedom: int, expected: float) -> None:
    assert quantile(0.95, freedom) == pytest.approx(expected, rel=5e-6)
    assert coverage(quantile(0.95, freedom), freedom) == pytest.approx(0.95, abs=1e-12)


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert interval([0.5, 0.5, 0.5]) == 0.0


def test_what_is_unfinished_empty_or_there_twice_is_reported() -> None:
    runs = [
        run("ode", 0, FIFO, finished=False),
        run("ode", 1, {}),
        run("ode", 2, FIFO),
        run("ode", 2, FIFO),
    ]
    found = compare(runs)
    assert found.rows[0].seeds == 2
    assert found.rows[0].finished == 1
    assert found.notes == (
        "ode-1: left out, no evaluation yet",
        "ode-2: left out, ode-2 has the same task, method and seed",
        "not finished, counted as far as they got: ode-0 (round 120)",
    )


@pytest.mark.parametrize(
    ("rejected", "note"),
    [
        (
            {"zero-model": 7, "weight-cut": 9},
            "7 of 10 reports were rejected, most of them for 'zero-model'",
        ),
        (
            {"model-not-finite": 4, "large-update": 3},
            "diverged, 7 of 10 reports were rejected, most of them for 'model-not-finite': "
            "lower train.learning_rate",
        ),
        ({"weight-cut": 9}, ""),
        ({"zero-model": 5}, ""),
    ],
)
def test_a_run_whose_reports_were_mostly_rejected_is_noted(
    rejected: dict[str, int], note: str
) -> None:
    good = run("ode", 0, {0: 0.1, 10: 0.1})
    rounds = Round(round=10, participants=(1, 2), participations=10, refused_reports=rejected)
    bad = Run(good.path, good.header, (*good.lines[:-1], rounds, good.lines[-1]))
    assert compare([bad]).notes == ((f"ode-0: {note}",) if note else ())
    assert has_diverged(bad) is note.startswith("diverged")


def test_a_run_without_a_finite_loss_has_diverged() -> None:
    diverged = run("ode", 0, {0: 0.1, 10: None})
    assert has_diverged(diverged)
    assert not has_diverged(run("ode", 0, {0: None}))
    assert compare([diverged]).notes == (
        "ode-0: diverged, its loss is not finite: lower train.learning_rate",
    )


def test_methods_whose_accuracy_still_rises_are_noted_together() -> None:
    rising = {n: n / 20 for n in range(11)}
    flat = {n: min(n, 5) / 20 for n in range(11)}
    runs = [run("fifo", 0, flat), run("ode", 0, rising), run("ode", 1, rising)]
    assert compare(runs).notes == (
        "toy: not converged, the accuracy still rose by more than a point over the last fifth of "
        "the run: ode (+10.0); train longer or raise train.learning_rate",
    )
    assert compare([run("ode", 0, rising, finished=False)]).notes[0].startswith("not finished")


def test_means_leave_out_unfinished_seeds_where_others_have_finished() -> None:
    runs = [run("ode", 0, FIFO), run("ode", 1, {0: 0.1, 20: 0.2}, finished=False)]
    row = compare(runs).rows[0]
    assert (row.seeds, row.finished, row.measures["final"].mean) == (2, 1, 0.6)
    assert compare(runs[1:]).rows[0].measures["final"].mean == 0.2


def detailed(method: str, recalls: tuple[float | None, float | None]) -> Run:
    plain = run(method, 0, {})
    header = Header(**{**asdict(plain.header), "labels": ("a_1", "b")})
    last = Evaluation(
        round=5, accuracy=0.5, loss=1.0, worst_tenth=0.25, rare_recall=0.125, label_recall=recalls
    )
    return Run(plain.path, header, (header, last, End(round=5, digest="")))


def test_full_tables_have_worst_devices_tail_recall_and_the_recall_of_each_label() -> None:
    comparison = compare([detailed("fifo", (0.75, None)), detailed("ode", (0.5, 1.0))])
    titles = [table.title for table in tables(comparison)]
    assert titles == ["toy", "toy: against fifo"]
    full = {table.title: table.rows for table in tables(comparison, full=True)}
    assert full["toy: worst devices and rare labels"] == (
        ("fifo", "25.00 %", "12.50 %"),
        ("ode", "25.00 %", "12.50 %"),
    )
    assert full["toy: recall of each label"] == (
        ("a_1", "75.00 %", "50.00 %"),
        ("b", "-", "100.00 %"),
    )
    text = latex(comparison)
    assert r"a\_1 & 75.00 \% & 50.00 \% \\" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 4
    header, row = as_csv([detailed("ode", (0.5, None))]).splitlines()
    assert header.endswith("finished,recall:a_1,recall:b")
    assert row.endswith(",0.25,0.125,,,,True,0.5,")


@pytest.mark.parametrize("width", [None, 300, 60, 20, 1])
def test_a_table_as_text_keeps_every_number_at_any_width(width: int | None) -> None:
    name = "a-method-with-a-name-of-many-words-" * 3
    runs = [run(name, seed, FIFO) for seed in range(3)] + [run("fifo", 0, FIFO)]
    for table in tables(compare(runs, ["fifo"])):
        text = as_text(table, width)
        for row in table.rows:
            assert all(cell in text for cell in row)
        if width is None:
            assert len(text.splitlines()) == len(table.rows) + 2
        elif width == 300:
            assert max(map(len, text.splitlines())) <= width
