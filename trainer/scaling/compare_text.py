"""A comparison in sentences, for the terminal and the page; nothing here is wrapped."""

from collections.abc import Iterator, Sequence

from trainer.scaling.budgets import END_TOLERANCE, FURTHEST, MIN_LEAD, Standing
from trainer.scaling.compare import (
    DIFFERENT,
    EQUIVALENT,
    UNFIT,
    Comparison,
    Pair,
    Recipe,
    pair_level,
)
from trainer.scaling.curve.fit import FLAGS
from trainer.scaling.seeds import MARGIN, SEED_SD
from trainer.scaling.text import amount, amounts, interval, level, percent, signed

MAX_NAMED = 4  # recipes in the answer
FEW = 3  # recipes of which every pair is described in sentences, and B and C_mid compared


def recipe_sentences(comparison: Comparison) -> list[str]:
    """Why a ceiling is not identified, and which runs are left out."""
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


def answer(comparison: Comparison, unit: str) -> Iterator[str]:
    """Which recipe is best where all have data, and which others it is not surely ahead of."""
    if comparison.end is None or comparison.incomparable or len(comparison.end[1]) < 2:
        return
    at, (first, *rest) = comparison.end
    others = [s for s in rest if s.best is not None]
    if first.best is None or not others:
        return
    open_pairs = [{p.a, p.b} for p in comparison.pairs if p.ahead != first.recipe]
    near = [s.recipe for s in others if {first.recipe, s.recipe} in open_pairs]
    more = f" and {len(near) - MAX_NAMED} more" if len(near) > MAX_NAMED + 1 else ""
    behind = f"surely ahead of {len(others) - len(near)} of {len(others)}, " * (len(near) < len(others))
    sure = f"{behind}not distinguished from {', '.join(near[:MAX_NAMED] if more else near)}{more}"
    if not near:
        sure = "surely ahead of all others" if len(others) > 1 else f"surely ahead of {others[0].recipe}"
    best = f", the best with a probability of {percent(first.best)}"
    yield (
        f"At {amount(at)} {unit}{_shared(comparison)}: {first.recipe}, reward "
        f"{interval(first.reward, '.3f')}{best}; {sure}."
    )


def reward_seed_sentence(comparison: Comparison, unit: str) -> Iterator[str]:
    """How far apart the rewards of two runs of one recipe are."""
    if comparison.end is None:
        return
    spread = interval(comparison.spread["reward"], ".3f")
    margin = f"two runs by up to ±{comparison.reward_margin:.3f} ({level(comparison.confidence)})"
    at, groups = amount(comparison.end[0]), [len(recipe.forecasts) for recipe in comparison.recipes]
    if max(groups) < 2:
        yield (
            "There is one run of each recipe, so it is an assumption how much runs of one recipe differ: in "
            f"reward at {at} {unit} with a standard deviation of {spread}, {margin}. More seeds measure it."
        )
        return
    yield (
        f"Seeds: runs of one recipe differ in reward at {at} {unit} with a standard deviation of {spread}, "
        f"{margin}. Measured with {sum(groups)} runs of {len(groups)} recipes; the prior is known to a "
        "factor of two."
    )


def seed_sentence(comparison: Comparison) -> str:
    """How much runs of one recipe differ, and how that is known."""
    if not comparison.seeds:
        paper = " (the paper's; --margin)" if comparison.margin == MARGIN else " (--margin)"
        return (
            "There is one run of each recipe. How much runs of one recipe differ is therefore assumed, to a "
            f"factor of two: the ceilings of two runs by up to ±{comparison.margin:g}{paper}, B and C_mid "
            f"with a standard deviation of {SEED_SD:.0%}, for which nothing is published."
        )
    runs = sum(len(recipe.used) for recipe in comparison.recipes)
    A, B, C_mid = (
        f"{interval(comparison.spread[name], form)} in {name}"
        for name, form in (("A", ".3f"), ("B", ".0%"), ("C_mid", ".0%"))
    )
    return (
        f"Runs of one recipe differ with a standard deviation of {A}, {B} and {C_mid}. That is the prior "
        f"(ceilings of two runs differ by up to ±{comparison.margin:g}; for B and C_mid, {SEED_SD:.0%} is "
        f"assumed), updated with {runs} runs of {len(comparison.recipes)} recipes."
    )


def level_sentence(comparison: Comparison) -> str:
    """At which level two recipes are said to differ; empty if none are compared."""
    if not comparison.pairs:
        return ""
    A, B = (pair_level(name, comparison.confidence) for name in ("A", "B"))
    return (
        f"Differences of two recipes have wider intervals ({level(A)} for A, {level(B)} for B and C_mid), "
        f"which hold for the three together with {level(comparison.confidence)}."
    )


def pair_sentences(pair: Pair, comparison: Comparison, unit: str) -> list[str]:
    """What is known of two recipes; of many pairs, only their ceilings and leads."""
    two = [recipe for recipe in comparison.recipes if recipe.name in (pair.a, pair.b)]
    sentences = [*_rewards(pair, comparison, unit), _ceilings(pair, two)]
    if not pair.doubts and len(comparison.recipes) <= FEW:
        sentences += _efficiencies(pair, unit)
    return sentences + _leads(pair, two, comparison, unit)


def _rewards(pair: Pair, comparison: Comparison, unit: str) -> Iterator[str]:
    if comparison.end is None or pair.reward is None:
        return
    where = f"Reward at {amount(comparison.end[0])} {unit}{_shared(comparison)}"
    if pair.ahead:
        e = pair.reward if pair.ahead == pair.a else pair.reward.times(-1)
        low, high = sorted((e.low, e.high))
        by = f"+{e.value:.3f} ({low:.3f} to {high:.3f})"
        yield f"{where}: {pair.ahead} is ahead by {by}, more than fits and seeds explain."
    else:
        yield f"{where}: not distinguished, {pair.a} less {pair.b} {signed(pair.reward)}."


def _shared(comparison: Comparison) -> str:
    assert comparison.end is not None
    shared = all(s.times_data <= END_TOLERANCE for s in comparison.end[1])
    return ", to which all have data" if shared else ""


def _ceilings(pair: Pair, two: Sequence[Recipe]) -> str:
    if pair.doubts:
        return f"Whether the ceilings differ is not known: {_unidentified(two, 'that', 'those')}."
    if pair.verdict == DIFFERENT:
        return f"The ceilings differ: A {signed(pair.A)}."
    if pair.verdict == EQUIVALENT:
        return (
            f"The ceilings are equivalent: A {signed(pair.A_runs)} in these runs, within the "
            f"±{pair.margin:.3f} of two runs of one recipe."
        )
    return f"Whether the ceilings differ is not known: A {signed(pair.A)}. Train longer, or run more seeds."


def _efficiencies(pair: Pair, unit: str) -> list[str]:
    if pair.cautions:
        reasons = "; ".join(FLAGS[flag] for flag in pair.cautions)
        return [f"B and C_mid are not compared: {reasons}."]
    at = "each at its own ceiling" if pair.common_A is None else f"both at the ceiling {pair.common_A:.3f}"
    B = " against ".join(interval(one, ".2f") for one in pair.B)
    C_mid = " against ".join(map(amounts, pair.C_mid))
    differ = {True: "they differ", False: "no difference is visible"}
    sentences = [
        f"Efficiency B, {at}: {B}, ratio {interval(pair.B_ratio, '.2f')}: {differ[pair.B_differs]}.",
        f"Midpoint C_mid, {at}: {C_mid} {unit}, ratio {interval(pair.C_mid_ratio, '.2f')}: "
        f"{differ[pair.C_mid_differs]}.",
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
        sentences.append(f"{crossing.winner} overtakes at {amounts(crossing.compute)} {unit}{beyond}.")
    ranges = []
    for lead in pair.leads:
        start = f"from {amount(lead.low)} " if lead.low > low else ""
        end = f"{'up ' * (not start)}to {amount(lead.high)}" if start or lead.high < high else ""
        where = f"{start}{end}" or f"everywhere from {amount(low)} to {amount(high)}"
        ranges.append(f"{lead.winner} is ahead {where}")
    sure = f"({level(pair_level('A', comparison.confidence))} over all these budgets together)"
    if ranges:
        beyond = "; beyond that it is not known" if pair.leads[-1].high < high else ""
        return [*sentences, f"{', and '.join(ranges)} {unit} {sure}{beyond}."]
    return [f"Neither is ahead anywhere from {amount(low)} to {amount(high)} {unit} {sure}."]


def budget_sentences(comparison: Comparison) -> list[str]:
    """Which recipes are not ranked, and what extrapolation assumes."""
    furthest = max((at for at, _ in comparison.budgets), default=0.0)
    hidden = [f"{r.name} ({_reasons(r)})" for r in comparison.recipes if not r.forecasts]
    further = [r for r in comparison.recipes if r.forecasts and furthest > r.reach]
    sentences = [f"Left out of this table: {'; '.join(hidden)}."] if hidden else []
    rising = [r for r in further if r.reach > END_TOLERANCE * r.last]
    if flat := [recipe.name for recipe in further if recipe not in rising]:
        sentences.append(f"Not ranked beyond its data, because it has not risen: {', '.join(flat)}.")
    if unsure := [recipe.name for recipe in rising if recipe.doubts]:
        text = "Not ranked beyond twice its data, because its ceiling is not identified"
        sentences.append(f"{text}: {', '.join(unsure)}.")
    if short := [recipe.name for recipe in rising if not recipe.doubts]:
        sentences.append(f"Not ranked beyond {FURTHEST:g} times its data: {', '.join(short)}.")
    if any(extrapolated(s) for _, standings in comparison.budgets for s in standings):
        sentences.append("* A forecast, beyond the recipe's data: it assumes that the run goes on as it did.")
    return sentences


def reward_at(standing: Standing) -> str:
    """The reward at a budget; the range alone where the recipe is not ranked."""
    return interval(standing.reward, ".3f", not standing.range_alone)


def extrapolated(standing: Standing) -> str:
    """`extrapolated, 2 × its data`; nothing within the data, or where another run just ended later."""
    times = standing.times_data
    return f"extrapolated, {amount(times, 2)} × its data" if times > END_TOLERANCE else ""


def _unidentified(recipes: Sequence[Recipe], one: str, several: str) -> str:
    names = [recipe.name for recipe in recipes if recipe.doubts]
    if len(names) > 1:
        return f"{several} of {', '.join(names[:-1])} and {names[-1]} are not identified"
    return f"{one} of {names[0]} is not identified"


def _reasons(recipe: Recipe) -> str:
    fits = [recipe.fits[i] for i in recipe.used]
    together = ", with all its runs together" if len(fits) > 1 else ""
    flags = [flag for flag in recipe.doubts if recipe.described or flag in UNFIT]
    return "; ".join(fits[0].describe(flag) + together * (flag == "wide") for flag in flags)
