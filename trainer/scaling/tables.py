"""A comparison in tables and sentences, for the terminal and the page: first the answer, then its parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.scaling import compare_text as text_of
from trainer.scaling.budgets import FURTHEST, Standing
from trainer.scaling.compare import DIFFERENT, EQUIVALENT, Comparison, Pair, Recipe, pair_level
from trainer.scaling.curve.fit import FLAGS
from trainer.scaling.text import amount, amounts, interval, level, paragraph, percent, table


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text, the head first; a title above them and sentences below. Without rows, those alone."""

    rows: Sequence[tuple[str, ...]]
    title: str = ""
    notes: Sequence[str] = ()
    ranked: bool = False  # the rows are numbered

    def __str__(self) -> str:
        """For a terminal of 80 columns."""
        rows = self.rows
        if self.ranked:
            places = ["  ", *(f"{i:2}" for i in range(1, len(rows)))]
            rows = [(f"{place} {row[0]}", *row[1:]) for place, row in zip(places, rows, strict=True)]
        lines = [self.title] if self.title else []
        return "\n".join([*lines, *(table(rows) if rows else ()), *(paragraph(x, "") for x in self.notes)])


@dataclass(frozen=True, slots=True)
class Section:
    """Two recipes compared, in sentences."""

    title: str
    sentences: Sequence[str]

    def __str__(self) -> str:
        return "\n".join([self.title, *map(paragraph, self.sentences)])


def parts(comparison: Comparison, unit: str, details: bool) -> Iterator[str | Table | Section]:
    """All that a comparison says, in order; of many recipes, each pair in sentences only with `details`."""
    several = len(comparison.recipes) > text_of.FEW and not details
    yield from text_of.answer(comparison, unit)
    yield from ranking(comparison, unit)
    yield from text_of.reward_seed_sentence(comparison, unit)
    for pair in comparison.pairs * (not several):
        yield Section(f"{pair.a} against {pair.b}", text_of.pair_sentences(pair, comparison, unit))
    yield from at_budgets(comparison, unit)
    yield from costs(comparison, unit)
    yield from ceilings(comparison, unit, several)
    yield data(comparison, unit)


def ranking(comparison: Comparison, unit: str) -> Iterator[Table]:
    """The recipes at the end of the data that all have, best first, and whom each is surely ahead of."""
    if comparison.end is None:
        return
    compute, standings = comparison.end
    place = {s.recipe: i for i, s in enumerate(standings, 1)}
    recipes = {recipe.name: recipe for recipe in comparison.recipes}
    rows: list[tuple[str, ...]] = [("recipe", "runs", f"reward at {amount(compute)}", "best", "ahead of")]
    for s in standings:
        ahead = [p.b if p.a == s.recipe else p.a for p in comparison.pairs if p.ahead == s.recipe]
        count, all_runs = len(recipes[s.recipe].forecasts), len(recipes[s.recipe].fits)
        runs = f"{count} of {all_runs}" if count < all_runs else str(count)
        reward = _dashed(text_of.reward_at(s))
        rows.append((s.recipe, runs, reward, _best(s), ranges([place[name] for name in ahead])))
    note = f"({level(comparison.confidence)} intervals of the recipe, other seeds included; {unit})"
    if comparison.incomparable:
        yield Table([row[:3] for row in rows], notes=[note])
        return
    sure = level(pair_level("A", comparison.confidence))
    note = (
        f"{note[:-1]}. Best: the probability of being it. Ahead of: those that are behind by more than "
        f"fits and seeds explain, which holds for all of them together with {sure})"
    )
    yield Table(rows, notes=[note], ranked=True)


def at_budgets(comparison: Comparison, unit: str) -> Iterator[Table]:
    """The rewards at every budget, and the probabilities of being best."""
    if not comparison.budgets:
        return
    by_name = [{s.recipe: s for s in row} for _, row in comparison.budgets]
    head = ("recipe", *(amount(at) for at, _ in comparison.budgets))
    names = [s.recipe for s in comparison.end[1]] if comparison.end else []
    rewards = [(name, *(_reward(row[name]) for row in by_name)) for name in names]
    title = f"Reward at a budget in {unit} (± half of the {level(comparison.confidence)} interval):"
    yield Table([head, *rewards], title, text_of.budget_sentences(comparison))
    best = [(name, *(_best(row[name]) for row in by_name)) for name in names]
    if any(cell for row in best for cell in row[1:]):
        yield Table([head, *best], f"Probability of being the best at a budget in {unit}:")


def _reward(s: Standing) -> str:
    mark = "*" * bool(text_of.extrapolated(s))
    if s.range_alone:
        return f"{s.reward.low:.3f}–{s.reward.high:.3f}{mark}"
    return f"{s.reward.value:.3f}±{(s.reward.high - s.reward.low) / 2:.3f}{mark}"


def _best(s: Standing) -> str:
    return "" if s.best is None else percent(s.best)


def _dashed(text: str) -> str:
    return text.replace(" to ", "–")


def costs(comparison: Comparison, unit: str) -> Iterator[Table]:
    """The compute that each recipe needs for some rewards."""
    for reward, costs_of in comparison.costs:
        leader = next(cost.recipe for cost in costs_of if cost.ratio is None)
        rows: list[tuple[str, ...]] = [("recipe", unit, f"× {leader}")]
        for cost in sorted(costs_of, key=lambda cost: cost.compute.value):
            ratio = interval(cost.ratio, ".2f") if cost.ratio else "1"
            rows.append((cost.recipe, _dashed(amounts(cost.compute)), _dashed(ratio)))
        unreached = any("∞" in cell for row in rows for cell in row)
        notes = [f"(∞: not within {FURTHEST:g} times its data)"] * unreached
        yield Table(rows, f"Compute to reach a reward of {reward:g}, and over that of {leader}:", notes)


def ceilings(comparison: Comparison, unit: str, several: bool) -> Iterator[str | Table]:
    """A, B and C_mid of the recipes that a sigmoid describes, and why the others have none."""
    rows: list[tuple[str, ...]] = [("recipe", "ceiling A", "efficiency B", "midpoint C_mid")]
    for recipe in (recipe for recipe in comparison.recipes if recipe.described):
        A, B, C_mid = (recipe.estimate(name) for name in ("A", "B", "C_mid"))
        cells = (interval(A, ".3f"), interval(B, ".2f"), amounts(C_mid))
        if recipe.doubts:
            cells = (f"not identified: {A.low:.2f} to {A.high:.2f}", "", "")
        rows.append((recipe.name, *map(_dashed, cells)))
    about = f"({level(comparison.confidence)} intervals of the recipe, other seeds included; C_mid in {unit})"
    reasons = _shared_reasons(comparison.recipes) if several else text_of.recipe_sentences(comparison)
    yield Table(rows, notes=[about, *reasons]) if rows[1:] else Table([], notes=reasons)
    if any(not recipe.doubts for recipe in comparison.recipes):
        yield f"{text_of.seed_sentence(comparison)} {text_of.level_sentence(comparison)}".rstrip()
    if several and (verdicts := list(_verdicts(comparison.pairs))):
        yield Table([], notes=verdicts)


def _shared_reasons(recipes: Sequence[Recipe]) -> list[str]:
    """Why ceilings are not identified, one sentence for all recipes with the same reasons."""
    names: dict[str, list[str]] = {}
    for recipe in recipes:
        if recipe.doubts:
            names.setdefault("; ".join(FLAGS[flag] for flag in recipe.doubts), []).append(recipe.name)
    return [f"Ceiling not identified: {', '.join(those)}: {why}." for why, those in names.items()]


def _verdicts(pairs: Sequence[Pair]) -> Iterator[str]:
    """Which identified ceilings are above which, and which are equivalent."""
    known = [pair for pair in pairs if not pair.doubts]
    above: dict[str, list[str]] = {}
    equal: dict[str, list[str]] = {}
    for pair in known:
        high, low = (pair.a, pair.b) if pair.A.value > 0 else (pair.b, pair.a)
        if pair.verdict == DIFFERENT:
            above.setdefault(high, []).append(f"{low} by {abs(pair.A.value):.3f}")
        elif pair.verdict == EQUIVALENT:
            equal.setdefault(pair.a, []).append(pair.b)
    for name, others in above.items():
        yield f"The ceiling of {name} is above that of {', '.join(others)}."
    for name, others in equal.items():
        yield f"The ceilings of {name} and {', '.join(others)} are equivalent."
    if unknown := sum(pair.verdict not in (DIFFERENT, EQUIVALENT) for pair in known):
        yield f"Of {unknown} of {len(known)} pairs of identified ceilings it is not known (--details)."


def data(comparison: Comparison, unit: str) -> Table:
    """How much each recipe was trained and evaluated."""
    rows: list[tuple[str, ...]] = [("recipe", "runs", "evaluations", f"data to ({unit})")]
    for recipe in comparison.recipes:
        rows.append((recipe.name, str(len(recipe.fits)), str(recipe.evaluations), amount(recipe.last)))
    return Table(rows)


def ranges(numbers: Sequence[int]) -> str:
    """1, 3–5"""
    groups: list[list[int]] = []
    for n in sorted(numbers):
        if groups and n == groups[-1][-1] + 1:
            groups[-1].append(n)
        else:
            groups.append([n])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}–{g[-1]}" for g in groups)
