"""Print the test files for `make check`: those of the changed modules, and a core that takes seconds.

A test belongs to a module if its path mirrors the module's (tests/trainer/learner/test_packing.py of
trainer/learner/packing.py) or if it has changed itself. Changes are those since the last commit, or,
where there are none, those of the last commit.
"""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = (
    "tests/test_architecture.py",
    "tests/kernels/test_policy_loss.py",
    "tests/trainer/controller/test_sampler.py",
)


def changed() -> list[Path]:
    """Paths that git reports as changed or new."""

    def git(*arguments: str) -> list[str]:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    names = git("diff", "--name-only", "HEAD") + git("ls-files", "--others", "--exclude-standard")
    return [Path(n) for n in names or git("diff", "--name-only", "HEAD~1")]


def tests() -> set[str]:
    """The test files of what has changed, and the core."""
    files = set(CORE)
    for path in changed():
        if path.name.startswith(("test_", "bench_")) and path.suffix == ".py":
            files.add(str(path))
        elif path.suffix == ".py" and path.parts[0] in ("kernels", "trainer", "bench"):
            folder = ROOT / "tests" / path.parent
            stem = path.parent.name if path.stem == "__init__" else path.stem
            files.update(str(p.relative_to(ROOT)) for p in folder.glob(f"test_*{stem}*.py"))
    return {f for f in files if (ROOT / f).exists()}


if __name__ == "__main__":
    print(*sorted(tests()))
