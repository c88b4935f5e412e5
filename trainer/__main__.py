"""`sigmoid-rl COMMAND ...`, or `python -m trainer COMMAND ...`: every command of the project."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version

CURVE = "trainer.scaling.__main__"
COMMANDS = {  # beside those of the curve: module, and what it does
    "train": ("trainer.main", "train a model; without arguments the recipe that a laptop ends in minutes"),
    "evaluate": ("trainer.evaluate.__main__", "score a model or a run's checkpoints on any held-out prompts"),
    "serve": ("trainer.serve.__main__", "serve a model or a run's newest weights over HTTP"),
    "view": (
        "trainer.view.__main__",
        "curve, metrics and every rollout of runs in a browser, while they train",
    ),
    "sweep": ("trainer.sweep.__main__", "train several recipes, or values of a setting, and compare them"),
    "merge": ("trainer.models.merge", "make a whole model of a LoRA adapter"),
    "doctor": ("trainer.doctor", "say what this machine can run, and what is missing"),
}
EXAMPLES = """
every COMMAND has its own --help; sigmoid-rl --version says which release this is.

examples:
  sigmoid-rl train --recipe tiny          # a model of 160,000 parameters learns to calculate
  sigmoid-rl predict runs/tiny-0 --at 1   # how high that run would end with one core-hour

sigmoid-rl --completion SHELL prints what makes bash, zsh or fish complete commands, bash options, too:
  eval "$(sigmoid-rl --completion bash)"        # in ~/.bashrc; zsh: the same with zsh, in ~/.zshrc
  sigmoid-rl --completion fish | source         # in ~/.config/fish/config.fish
"""
COMPLETION = {  # after the commands, files; in bash options, too, those of the command's --help
    "bash": """_sigmoid_rl() {{
  local words='{}'
  [ "$COMP_CWORD" = 1 ] || words=$("$1" "${{COMP_WORDS[1]}}" --help 2> /dev/null |
    grep -oE -- '--[a-z][a-z0-9_.-]*' | sort -u)
  [[ "$COMP_CWORD" != 1 && "$2" != -* ]] || COMPREPLY=($(compgen -W "$words" -- "$2"))
}}
complete -o default -F _sigmoid_rl sigmoid-rl""",
    "zsh": "autoload -U compinit; compinit; "
    'compdef \'_arguments "1:command:({})" "*:file:_files"\' sigmoid-rl',
    "fish": "complete -c sigmoid-rl -n __fish_use_subcommand -f -a '{}'",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command; 2 if there is none of that name."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    curve: dict[str, str] = import_module(CURVE).COMMANDS
    about = {key: text for key, (_, text) in COMMANDS.items()} | curve
    if name in ("-h", "--help"):
        listed = "\n".join(f"  {key:10} {text}" for key, text in about.items())
        print(f"usage: sigmoid-rl COMMAND ...\n\n{listed}\n{EXAMPLES}", end="")
        return 0
    if name == "--version":
        print(f"sigmoid-rl {version('sigmoid-rl')}")
        return 0
    if name == "--completion" and (shell := (words or ["bash"])[0]) in COMPLETION:
        print(COMPLETION[shell].format(" ".join(about)))
        return 0
    if name not in about:
        meant = get_close_matches(name, about, n=1)
        advice = f"did you mean {meant[0]}?" if meant else f"expected one of {', '.join(about)}"
        print(f"error: there is no command {name!r}; {advice}", file=sys.stderr)
        return 2
    if name in curve:
        if argv is None:  # this is the process's own work
            import_module(CURVE).as_process()
        return int(import_module(CURVE).main([name, *words]))
    sys.argv[1:] = words
    return int(import_module(COMMANDS[name][0]).main() or 0)


if __name__ == "__main__":
    sys.exit(main())
