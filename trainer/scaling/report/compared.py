"""What `compare` says of the recipes, for the page."""

from dataclasses import dataclass

from trainer.scaling.compare import Standing


@dataclass(frozen=True, slots=True)
class Compared:
    """Recipes compared, in the sentences of the command."""

    warnings: tuple[str, ...]  # what should not be compared
    seeds: str  # how much runs of one recipe differ
    pairs: tuple[tuple[str, tuple[str, ...]], ...]  # ("a against b", sentences)
    budgets: tuple[float, ...]
    standings: tuple[tuple[str, tuple[Standing | None, ...]], ...]  # by recipe, for each budget
