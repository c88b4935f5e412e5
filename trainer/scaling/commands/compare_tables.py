"""The tables of `compare`, for a terminal of 80 columns: the ranking first, then what it is made of."""

from collections.abc import Iterator, Sequence

from trainer.scaling import compare_text as text_of
from trainer.scaling.budgets import FURTHEST, Standing
from trainer.scaling.compare import DIFFERENT, EQUIVALENT, Comparison, Pair, Recipe, pair_level
from trainer.scaling.curve.fit import FLAGS
from trainer.scaling.text import amount, amounts, interval, paragraph, percent, table

FEW = 3  # recipes of which every pair is described in sentences without --details


def ranking(comparison: Comparison, unit: str) -> Iterator[str]:
    """The recipes at the end of the data that all have, best first, and whom each is surely ahead of."""
    if comparison.end is None:
        return
    at, rows = comparison.end
    place = {s.recipe: i for i, s in enumerate(rows, 1)}
    runs = {recipe.name: recipe for recipe in comparison.recipes}
    cells: list[tuple[str, ...]] = [("   recipe", "runs", f"reward at {amount(at)}", "best", "ahead of")]
    for s in rows:
        ahead = [p.b if p.a == s.recipe else p.a for p in comparison.pairs if p.ahead == s.recipe]
        count, all_runs = len(runs[s.recipe].forecasts), len(runs[s.recipe].fits)
        cells.append((
            f"{place[s.recipe]:2} {s.recipe}",
            f"{count} of {all_runs}" if count < all_runs else str(count),
            text_of.reward_at(s).replace(" to ", "–"),
            "" if s.best is None else percent(s.best),
            ranges([place[name] for name in ahead]),
        ))  # fmt: skip
    if comparison.incomparable:
        cells = [(row[0][3:], *row[1:3]) for row in cells]
    level = text_of.level(comparison.confidence)
    note = f"({level} intervals of the recipe, other seeds included; {unit})"
    if not comparison.incomparable:
        sure = text_of.level(pair_level("A", comparison.confidence))
        note = (
            f"{note[:-1]}. Best: the probability of being it. Ahead of: those that are behind by more than "
            f"fits and seeds explain, which holds for all of them together with {sure})"
        )
    yield "\n".join([*table(cells), paragraph(note, "")])


def at_budgets(comparison: Comparison, unit: str) -> Iterator[str]:
    """The rewards at every budget, and the probabilities of being best."""
    if not comparison.budgets:
        return
    named = {at: {s.recipe: s for s in row} for at, row in comparison.budgets}
    heads = tuple(amount(at) for at in named)
    names = [s.recipe for s in comparison.end[1]] if comparison.end else []
    rewards = [(name, *(_reward(row[name]) for row in named.values())) for name in names]
    level = text_of.level(comparison.confidence)
    lines = [f"Reward at a budget in {unit} (± half of the {level} interval):"]
    notes = [paragraph(text, "") for text in text_of.budget_sentences(comparison)]
    yield "\n".join([*lines, *table([("recipe", *heads), *rewards]), *notes])
    best = [(name, *(_best(row[name]) for row in named.values())) for name in names]
    if any(cell for row in best for cell in row[1:]):
        lines = [f"Probability of being the best at a budget in {unit}:"]
        yield "\n".join([*lines, *table([("recipe", *heads), *best])])


def _reward(s: Standing) -> str:
    mark = "*" * bool(text_of.extrapolated(s))
    if s.range_alone:
        return f"{s.reward.low:.3f}–{s.reward.high:.3f}{mark}"
    return f"{s.reward.value:.3f}±{(s.reward.high - s.reward.low) / 2:.3f}{mark}"


def _best(s: Standing) -> str:
    return "" if s.best is None else percent(s.best)


def costs(comparison: Comparison, unit: str) -> Iterator[str]:
    """The compute that each recipe needs for some rewards."""
    for reward, rows in comparison.costs:
        leader = next(row.recipe for row in rows if row.ratio is None)
        cells: list[tuple[str, ...]] = [("recipe", unit, f"× {leader}")]
        for row in sorted(rows, key=lambda row: row.compute.value):
            ratio = interval(row.ratio, ".2f") if row.ratio else "1"
            cells.append((row.recipe, *(x.replace(" to ", "–") for x in (amounts(row.compute), ratio))))
        lines = [f"Compute to reach a reward of {reward:g}, and over that of {leader}:", *table(cells)]
        if any("∞" in cell for row in cells for cell in row):
            lines.append(f"(∞: not within {FURTHEST:g} times its data)")
        yield "\n".join(lines)


def ceilings(comparison: Comparison, unit: str, details: bool) -> Iterator[str]:
    """A, B and C_mid of the recipes that a sigmoid describes, and why the others have none."""
    shown = [recipe for recipe in comparison.recipes if recipe.described]
    rows: list[tuple[str, ...]] = [("recipe", "ceiling A", "efficiency B", "midpoint C_mid")]
    for recipe in shown:
        A, B, C_mid = (recipe.estimate(name) for name in ("A", "B", "C_mid"))
        cells = (interval(A, ".3f"), interval(B, ".2f"), amounts(C_mid))
        if recipe.doubts:
            cells = (f"not identified: {A.low:.2f} to {A.high:.2f}", "", "")
        rows.append((recipe.name, *(cell.replace(" to ", "–") for cell in cells)))
    level = text_of.level(comparison.confidence)
    about = f"({level} intervals of the recipe, other seeds included; C_mid in {unit})"
    lines = [*table(rows), about] if shown else []
    several = len(comparison.recipes) > FEW and not details
    reasons = _shared_reasons(comparison.recipes) if several else text_of.recipe_sentences(comparison)
    yield "\n".join([*lines, *(paragraph(text, "") for text in reasons)])
    if any(not recipe.doubts for recipe in comparison.recipes):
        sure = f"{text_of.seed_sentence(comparison)} {text_of.level_sentence(comparison)}".rstrip()
        yield paragraph(sure, "")
    if several and (verdicts := list(_verdicts(comparison.pairs))):
        yield "\n".join(paragraph(text, "") for text in verdicts)


def _shared_reasons(recipes: Sequence[Recipe]) -> list[str]:
    """Why ceilings are not identified, one sentence for all recipes with the same reasons."""
    names: dict[str, list[str]] = {}
    for recipe in recipes:
        if recipe.doubts:
            names.setdefault("; ".join(FLAGS[flag] for flag in recipe.doubts), []).append(recipe.name)
    return [f"Ceiling not identified: {', '.join(those)}: {why}." for why, those in names.items()]


def _verdicts(pairs: Sequence[Pair]) -> Iterator[str]:
    """Of identified ceilings, which are above which, and which are equivalent."""
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
    if left := len(known) - sum(pair.verdict in (DIFFERENT, EQUIVALENT) for pair in known):
        yield f"Of {left} of {len(known)} pairs of identified ceilings it is not known (--details)."


def data(comparison: Comparison, unit: str) -> str:
    """How much each recipe was trained and evaluated."""
    rows: list[tuple[str, ...]] = [("recipe", "runs", "evaluations", f"data to ({unit})")]
    for recipe in comparison.recipes:
        rows.append((recipe.name, str(len(recipe.fits)), str(recipe.evaluations), amount(recipe.last)))
    return "\n".join(table(rows))


def ranges(numbers: Sequence[int]) -> str:
    """1, 3–5"""
    groups: list[list[int]] = []
    for n in sorted(numbers):
        if groups and n == groups[-1][-1] + 1:
            groups[-1].append(n)
        else:
            groups.append([n])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}–{g[-1]}" for g in groups)
