"""A comparison in sentences and tables, for the terminal and the page: first the answer, then its parts."""

from collections.abc import Iterator, Sequence

from trainer.scaling.budgets import END_TOLERANCE, FURTHEST, MIN_LEAD, Standing
from trainer.scaling.compare import DIFFERENT, EQUIVALENT, UNFIT, Comparison, Pair, Recipe, pair_level
from trainer.scaling.curve.fit import FLAGS, Estimate
from trainer.scaling.layout import FORMS, MAX_NAMED, Block, Rows, amount, grouped, interval, level, percent
from trainer.scaling.seeds import MARGIN, SEED_SD

SIGNED = "+.3f"  # differences
FEW = 3  # recipes of which every pair is described in sentences, and B and C_mid compared


def parts(comparison: Comparison, unit: str, details: bool) -> Iterator[Block]:
    """All that a comparison says, in order; of many recipes, each pair in sentences only with `details`."""
    several = len(comparison.recipes) > FEW and not details
    if text := answer(comparison, unit):
        yield Block(notes=[text])
    yield from ranking(comparison, unit)
    if text := reward_seed_sentence(comparison, unit):
        yield Block(notes=[text])
    for pair in comparison.pairs * (not several):
        yield Block(title=f"{pair.a} against {pair.b}", notes=pair_sentences(pair, comparison, unit))
    yield from at_budgets(comparison, unit)
    yield from costs(comparison, unit)
    yield from ceilings(comparison, unit, several)
    rows: Rows = [("recipe", "runs", "evaluations", f"data to ({unit})")]
    rows += [(r.name, str(len(r.fits)), str(r.evaluations), amount(r.last)) for r in comparison.recipes]
    yield Block(rows)


def answer(comparison: Comparison, unit: str) -> str:
    """The best recipe where all have data, and the others that it is not surely ahead of; or empty."""
    if comparison.end is None or comparison.incomparable:
        return ""
    first, *rest = comparison.end[1]
    others = [s.recipe for s in rest if s.best is not None]
    if first.best is None or not others:
        return ""
    open_pairs = [{p.a, p.b} for p in comparison.pairs if p.ahead != first.recipe]
    near = [name for name in others if {first.recipe, name} in open_pairs]
    more = f" and {len(near) - MAX_NAMED} more" if len(near) > MAX_NAMED + 1 else ""
    behind = f"surely ahead of {len(others) - len(near)} of {len(others)}, " * (len(near) < len(others))
    sure = f"{behind}not distinguished from {', '.join(near[:MAX_NAMED] if more else near)}{more}"
    if not near:
        sure = f"surely ahead of {'all others' if len(others) > 1 else others[0]}"
    return (
        f"{_at_end(comparison, unit)}: {first.recipe}, reward {interval(first.reward, 'A')}, the best with "
        f"a probability of {percent(first.best)}; {sure}."
    )


def _at_end(comparison: Comparison, unit: str) -> str:
    assert comparison.end is not None
    shared = all(s.times_data <= END_TOLERANCE for s in comparison.end[1])
    return f"At {amount(comparison.end[0])} {unit}" + ", to which all have data" * shared


def ranking(comparison: Comparison, unit: str) -> Iterator[Block]:
    """The recipes at the end of the data that all have, best first, and whom each is surely ahead of."""
    if comparison.end is None:
        return
    compute, standings = comparison.end
    place = {s.recipe: i for i, s in enumerate(standings, 1)}
    recipes = {recipe.name: recipe for recipe in comparison.recipes}
    rows: Rows = [("recipe", "runs", f"reward at {amount(compute)}", "best", "ahead of")]
    for s in standings:
        ahead = [p.b if p.a == s.recipe else p.a for p in comparison.pairs if p.ahead == s.recipe]
        count, all_runs = len(recipes[s.recipe].forecasts), len(recipes[s.recipe].fits)
        runs = f"{count} of {all_runs}" if count < all_runs else str(count)
        reward = interval(s.reward, "A", not s.range_alone)
        rows.append((s.recipe, runs, reward, _best(s), ranges([place[name] for name in ahead])))
    note = f"({level(comparison.confidence)} intervals of the recipe, other seeds included; {unit}"
    if comparison.incomparable:
        yield Block([row[:3] for row in rows], notes=[f"{note})"])
        return
    sure = level(pair_level("A", comparison.confidence))
    note = (
        f"{note}. Best: the probability of being it. Ahead of: those that are behind by more than fits and "
        f"seeds explain, which holds for all of them together with {sure})"
    )
    yield Block(rows, notes=[note], ranked=True)


def reward_seed_sentence(comparison: Comparison, unit: str) -> str:
    """The difference in reward between two runs of one recipe, as a sentence; empty without a reward."""
    if comparison.end is None:
        return ""
    differ = (
        f"in reward at {amount(comparison.end[0])} {unit} with a standard deviation of "
        f"{interval(comparison.spread['reward'], 'A')}, two runs by up to ±{comparison.reward_margin:.3f} "
        f"({level(comparison.confidence)})"
    )
    runs = [len(recipe.forecasts) for recipe in comparison.recipes]
    if max(runs) < 2:
        return (
            "There is one run of each recipe, so it is an assumption how much runs of one recipe differ: "
            f"{differ}. More seeds measure it."
        )
    return (
        f"Seeds: runs of one recipe differ {differ}. Measured with {sum(runs)} runs of {len(runs)} recipes; "
        "the prior is known to a factor of two."
    )


def pair_sentences(pair: Pair, comparison: Comparison, unit: str) -> list[str]:
    """Sentences on two recipes; of many recipes, only on their rewards, ceilings and leads."""
    two = [recipe for recipe in comparison.recipes if recipe.name in (pair.a, pair.b)]
    sentences = []
    if comparison.end is not None and pair.reward is not None:
        e = pair.reward.times(-1) if pair.ahead == pair.b else pair.reward
        e = Estimate(e.value, *sorted((e.low, e.high)))
        result = f"not distinguished, {pair.a} less {pair.b} {interval(e, SIGNED)}"
        if pair.ahead:
            result = f"{pair.ahead} is ahead by +{interval(e, 'A')}, more than fits and seeds explain"
        sentences.append(f"Reward a{_at_end(comparison, unit)[1:]}: {result}.")
    sentences.append(_ceilings(pair, two))
    if not pair.doubts and len(comparison.recipes) <= FEW:
        sentences += _efficiencies(pair, unit)
    return sentences + _leads(pair, two, comparison, unit)


def _ceilings(pair: Pair, two: Sequence[Recipe]) -> str:
    if names := [recipe.name for recipe in two if recipe.doubts]:
        those = f"those of {' and '.join(names)} are" if len(names) > 1 else f"that of {names[0]} is"
        return f"Whether the ceilings differ is not known: {those} not identified."
    if pair.verdict == EQUIVALENT:
        return (
            f"The ceilings are equivalent: A {interval(pair.A_runs, SIGNED)} in these runs, within the "
            f"±{pair.margin:.3f} of two runs of one recipe."
        )
    difference = f"A {interval(pair.A, SIGNED)}."
    if pair.verdict == DIFFERENT:
        return f"The ceilings differ: {difference}"
    return f"Whether the ceilings differ is not known: {difference} Train longer, or run more seeds."


def _efficiencies(pair: Pair, unit: str) -> list[str]:
    if pair.cautions:
        return [f"B and C_mid are not compared: {'; '.join(FLAGS[flag] for flag in pair.cautions)}."]
    where = "each at its own ceiling" if pair.common_A is None else f"both at the ceiling {pair.common_A:.3f}"
    sentences = [
        f"{title} {name}, {where}: {' against '.join(interval(e, name) for e in values)}{suffix}, ratio "
        f"{interval(ratio, 'B')}: {'they differ' if differ else 'no difference is visible'}."
        for title, name, values, suffix, ratio, differ in (
            ("Efficiency", "B", pair.B, "", pair.B_ratio, pair.B_differs),
            ("Midpoint", "C_mid", pair.C_mid, f" {unit}", pair.C_mid_ratio, pair.C_mid_differs),
        )
    ]
    if pair.verdict not in (DIFFERENT, EQUIVALENT):
        sentences.append("B and C_mid depend on the ceilings, which cannot be distinguished.")
    return sentences


def _leads(pair: Pair, two: Sequence[Recipe], comparison: Comparison, unit: str) -> list[str]:
    low, high = pair.searched
    if fallen := [f"{recipe.name}: {_reasons(recipe)}" for recipe in two if not recipe.forecasts]:
        return [f"Which one is ahead is not computed. {'; '.join(fallen)}."]
    if high < MIN_LEAD * low:
        return ["Which one is ahead is not computed: their data share no range of compute."]
    sentences = []
    for crossing in pair.crossings:
        beyond = " (beyond the data)" if crossing.compute.value > min(r.last for r in two) else ""
        sentences.append(f"{crossing.winner} overtakes at {interval(crossing.compute)} {unit}{beyond}.")
    sure = f"({level(pair_level('A', comparison.confidence))} over all these budgets together)"
    everywhere, ahead = f"from {amount(low)} to {amount(high)}", []
    for lead in pair.leads:
        where = [f"from {amount(lead.low)}"] if lead.low > low else []
        if where or lead.high < high:
            where.append(f"{'to' if where else 'up to'} {amount(lead.high)}")
        ahead.append(f"{lead.winner} is ahead {' '.join(where) or f'everywhere {everywhere}'}")
    if not ahead:
        return [f"Neither is ahead anywhere {everywhere} {unit} {sure}."]
    beyond = "; beyond that it is not known" if pair.leads[-1].high < high else ""
    return [*sentences, f"{', and '.join(ahead)} {unit} {sure}{beyond}."]


def at_budgets(comparison: Comparison, unit: str) -> Iterator[Block]:
    """The rewards at every budget, and the probabilities of being best."""
    if not comparison.budgets:
        return
    by_name = [{s.recipe: s for s in row} for _, row in comparison.budgets]
    head = ("recipe", *(amount(budget) for budget, _ in comparison.budgets))
    names = [s.recipe for s in comparison.end[1]] if comparison.end else []
    rewards = [(name, *(_reward(row[name]) for row in by_name)) for name in names]
    title = f"Reward at a budget in {unit} (± half of the {level(comparison.confidence)} interval):"
    yield Block([head, *rewards], title, budget_sentences(comparison))
    best = [(name, *(_best(row[name]) for row in by_name)) for name in names]
    if any(cell for row in best for cell in row[1:]):
        yield Block([head, *best], f"Probability of being the best at a budget in {unit}:")


def budget_sentences(comparison: Comparison) -> list[str]:
    """The recipes that are not ranked, and the assumption of extrapolation, as sentences."""
    furthest = max((budget for budget, _ in comparison.budgets), default=0.0)
    hidden = [f"{r.name} ({_reasons(r)})" for r in comparison.recipes if not r.forecasts]
    sentences = [f"Left out of this table: {'; '.join(hidden)}."] if hidden else []
    unranked: dict[str, list[str]] = {
        "its data, because it has not risen": [],
        "twice its data, because its ceiling is not identified": [],
        f"{FURTHEST:g} times its data": [],
    }
    flat, unsure, short = unranked.values()
    for r in comparison.recipes:
        if r.forecasts and furthest > r.reach:
            (flat if r.reach <= END_TOLERANCE * r.last else unsure if r.doubts else short).append(r.name)
    sentences += [f"Not ranked beyond {why}: {', '.join(names)}." for why, names in unranked.items() if names]
    if any(_is_extrapolated(s) for _, standings in comparison.budgets for s in standings):
        sentences.append("* A forecast, beyond the recipe's data: it assumes that the run goes on as it did.")
    return sentences


def _is_extrapolated(s: Standing) -> bool:
    """True if beyond the data; not where another run just ended a little later."""
    return s.times_data > END_TOLERANCE


def _reward(s: Standing) -> str:
    reward = f"{s.reward.value:.3f}±{(s.reward.high - s.reward.low) / 2:.3f}"
    if s.range_alone:
        reward = f"{s.reward.low:.3f}–{s.reward.high:.3f}"
    return reward + "*" * _is_extrapolated(s)


def _best(s: Standing) -> str:
    return "" if s.best is None else percent(s.best)


def costs(comparison: Comparison, unit: str) -> Iterator[Block]:
    """The compute that each recipe needs for some rewards."""
    for reward, costs_of in comparison.costs:
        leader = next(cost.recipe for cost in costs_of if cost.ratio is None)
        rows: Rows = [("recipe", unit, f"× {leader}")]
        for cost in sorted(costs_of, key=lambda cost: cost.compute.value):
            rows.append(
                (cost.recipe, interval(cost.compute), interval(cost.ratio, "B") if cost.ratio else "1")
            )
        unreached = any("∞" in cell for row in rows for cell in row)
        notes = [f"(∞: not within {FURTHEST:g} times its data)"] * unreached
        yield Block(rows, f"Compute to reach a reward of {reward:g}, and over that of {leader}:", notes)


def ceilings(comparison: Comparison, unit: str, several: bool) -> Iterator[Block]:
    """A, B and C_mid of the recipes that a sigmoid describes, and why the others have none."""
    rows: Rows = [("recipe", "ceiling A", "efficiency B", "midpoint C_mid")]
    for recipe in (recipe for recipe in comparison.recipes if recipe.described):
        cells = [interval(recipe.estimate(name), name) for name in FORMS]
        if recipe.doubts:
            cells = [f"not identified: {interval(recipe.estimate('A'), '.2f', False)}", "", ""]
        rows.append((recipe.name, *cells))
    about = f"({level(comparison.confidence)} intervals of the recipe, other seeds included; C_mid in {unit})"
    reasons = recipe_sentences(comparison)
    if several:  # one sentence for all recipes with the same reasons
        unknown = [recipe for recipe in comparison.recipes if recipe.doubts]
        same = grouped(("; ".join(FLAGS[flag] for flag in r.doubts), r.name) for r in unknown)
        reasons = [f"Ceiling not identified: {', '.join(names)}: {why}." for why, names in same.items()]
    yield Block(rows, notes=[about, *reasons]) if rows[1:] else Block(notes=reasons)
    if any(not recipe.doubts for recipe in comparison.recipes):
        yield Block(notes=[seed_sentence(comparison)])
    if several and (verdicts := list(_verdicts(comparison.pairs))):
        yield Block(notes=verdicts)


def recipe_sentences(comparison: Comparison) -> list[str]:
    """The reasons why ceilings are not identified, and the runs that are left out, as sentences."""
    sentences = []
    for recipe in comparison.recipes:
        if recipe.doubts:
            sentences.append(f"{recipe.name}: the ceiling is not identified: {_reasons(recipe)}.")
            continue
        for i, (curve, fit) in enumerate(zip(recipe.curves, recipe.fits, strict=True)):
            if i not in recipe.used:
                reasons = "; ".join(fit.describe(flag) for flag in fit.flags if flag in UNFIT)
                sentences.append(f"{curve.name} is left out of {recipe.name}: {reasons}.")
    return sentences


def _reasons(recipe: Recipe) -> str:
    fits = [recipe.fits[i] for i in recipe.used]
    together = ", with all its runs together" if len(fits) > 1 else ""
    flags = [flag for flag in recipe.doubts if recipe.described or flag in UNFIT]
    return "; ".join(fits[0].describe(flag) + together * (flag == "wide") for flag in flags)


def seed_sentence(comparison: Comparison) -> str:
    """The spread over runs of one recipe, its source, and the levels of the differences, as sentences."""
    runs = sum(len(recipe.used) for recipe in comparison.recipes)
    spread = [f"{interval(comparison.spread[name], '.0%')} in {name}" for name in ("B", "C_mid")]
    text = (
        "Runs of one recipe differ with a standard deviation of "
        f"{interval(comparison.spread['A'], 'A')} in A, {' and '.join(spread)}. That is the prior "
        f"(ceilings of two runs differ by up to ±{MARGIN:g} (the paper's); for B and C_mid, {SEED_SD:.0%} is "
        f"assumed), updated with {runs} runs of {len(comparison.recipes)} recipes."
    )
    if runs == len(comparison.recipes):
        text = (
            "There is one run of each recipe. How much runs of one recipe differ is therefore assumed, to a "
            f"factor of two: the ceilings of two runs by up to ±{MARGIN:g} (the paper's), B and C_mid with a "
            f"standard deviation of {SEED_SD:.0%}, for which nothing is published."
        )
    if not comparison.pairs:
        return text
    A, B = (level(pair_level(name, comparison.confidence)) for name in ("A", "B"))
    return (
        f"{text} Differences of two recipes have wider intervals ({A} for A, {B} for B and C_mid), "
        f"which hold for the three together with {level(comparison.confidence)}."
    )


def _verdicts(pairs: Sequence[Pair]) -> Iterator[str]:
    """Sentences on identified ceilings that are above others, equivalent, or not distinguished."""
    known = [pair for pair in pairs if not pair.doubts]
    ordered = [(p.a, p.b, p) if p.A.value > 0 else (p.b, p.a, p) for p in known if p.verdict == DIFFERENT]
    for name, others in grouped((high, f"{low} by {abs(p.A.value):.3f}") for high, low, p in ordered).items():
        yield f"The ceiling of {name} is above that of {', '.join(others)}."
    for name, others in grouped((p.a, p.b) for p in known if p.verdict == EQUIVALENT).items():
        yield f"The ceilings of {name} and {', '.join(others)} are equivalent."
    if unknown := sum(pair.verdict not in (DIFFERENT, EQUIVALENT) for pair in known):
        yield f"Of {unknown} of {len(known)} pairs of identified ceilings it is not known (--details)."


def ranges(numbers: Sequence[int]) -> str:
    """1, 3–5"""
    runs = grouped((n - i, n) for i, n in enumerate(sorted(numbers))).values()
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
