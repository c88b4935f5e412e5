"""The page of an evaluation: its numbers, and samples to look at. It loads nothing from elsewhere."""

from datetime import date
from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from trainer.evaluate.question import Question
from trainer.evaluate.record import chosen_samples, results
from trainer.evaluate.view import table
from trainer.jsonl import write_atomic
from trainer.scaling.report.page import environment, resource, sample_view, version

PROMPTS, COMPLETIONS = 24, 8  # that the page shows; samples.jsonl has all


def write_page(question: Question) -> Path:
    """Write report.html into the folder of the results."""
    folder = Path(question.config.run_dir)
    samples = [sample_view(sample, COMPLETIONS) for sample in chosen_samples(folder, PROMPTS)]
    page = (files("trainer.evaluate") / "page.html").read_text(encoding="utf-8")
    template = environment().from_string(page)
    text = template.render(
        title=f"{question.run or question.config.model.path}: {question.name}",
        style=Markup(resource("page.css")),
        table=table(results(folder), question.name, question.unit),
        samples=samples,
        config=(folder / "config.yaml").read_text(encoding="utf-8"),
        made=f"{date.today():%d %B %Y} by sigmoid-rl {version()}",
    )
    out = folder / "report.html"
    write_atomic(out, text)
    return out
