"""verifiers' Wordle of TextArena, with four words in the place of NLTK's list, which it would download."""

import json
import tempfile
from pathlib import Path

import nltk

WORDS = ("apple", "house", "table", "water")


def _write(folder: Path) -> None:
    corpus, tagger = folder / "corpora/words", folder / "taggers/averaged_perceptron_tagger_eng"
    corpus.mkdir(parents=True)
    tagger.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (corpus / name).write_text("\n".join(WORDS))
    for name, value in {"weights": {}, "tagdict": dict.fromkeys(WORDS, "NN"), "classes": ["NN"]}.items():
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(value))


_folder = tempfile.TemporaryDirectory()
_write(Path(_folder.name))
nltk.data.path.insert(0, _folder.name)
nltk.download = lambda *arguments, **keywords: True

from verifiers.v1.tasksets.textarena import TextArenaEnv, TextArenaTaskset  # noqa: E402 (the words are there)

__all__ = ["TextArenaEnv", "TextArenaTaskset"]
