"""What the trainer asks of vLLM exists in vLLM's sources, by their syntax trees: nothing of vLLM is imported.

They are those of the installed vLLM, or of the unzipped wheels in $SIGMOID_RL_VLLM_SOURCES (folders with a
`vllm` in them, separated by colons), such as a release that no CPU build exists of: `make test-vllm-sources`.
"""

import ast
import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
OURS = [*sorted((ROOT / "trainer/engines/vllm").glob("*.py")), ROOT / "trainer/learner/weight_transfer.py"]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[Path]:
    if folders := os.environ.get("SIGMOID_RL_VLLM_SOURCES"):
        return [Path(folder) / "vllm" for folder in folders.split(":")]
    spec = importlib.util.find_spec("vllm")
    return [Path(spec.origin).parent] if spec and spec.origin else []


@pytest.fixture(params=sources() or [None], ids=lambda folder: folder.parent.name if folder else "none")
def vllm(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip("vLLM is not installed: make test-vllm, make test-vllm-sources")
    assert (request.param / "__init__.py").is_file(), request.param
    return Path(request.param)


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def file_of(vllm: Path, module: str) -> Path | None:
    path = vllm.parent / module.replace(".", "/")
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)


def defined(vllm: Path, module: str, name: str) -> ast.AST | None:
    """The definition of a name in a module, through imports of other modules of vLLM."""
    if file_of(vllm, f"{module}.{name}"):
        return tree(file_of(vllm, f"{module}.{name}"))  # type: ignore[arg-type]  # it is there
    file = file_of(vllm, module)
    if file is None:
        return None
    for node in ast.walk(tree(file)):
        match node:
            case ast.ClassDef(name=own) | ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own):
                if own == name:
                    return node
            case ast.ImportFrom(module=str(source), names=names, level=level):
                if level:  # relative to the package, or to one above it
                    package = module.split(".")[
                        : len(module.split(".")) - level + (file.name == "__init__.py")
                    ]
                    source = ".".join([*package, source])
                for alias in names:
                    if (alias.asname or alias.name) == name and source.startswith("vllm"):
                        return defined(vllm, source, alias.name)
            case ast.Assign(targets=[ast.Name(id=own)]) | ast.AnnAssign(target=ast.Name(id=own)) if (
                own == name
            ):
                return node
    lazy = re.search(rf'"{name}": "\.([\w.]+):{name}"', file.read_text())
    return defined(vllm, f"{module}.{lazy[1]}", name) if lazy else None


def bases(vllm: Path, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """A class of a module, and what it inherits from within vLLM."""
    yield module, node
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name) and isinstance(parent := defined(vllm, module, name.id), ast.ClassDef):
            origin = next((m for m in imports(vllm, module) if m[1] == name.id), (module, name.id))[0]
            yield from bases(vllm, origin, parent)


def imports(vllm: Path, module: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree(file_of(vllm, module))):  # type: ignore[arg-type]  # the caller has read it
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.asname or alias.name) for alias in node.names)


def parameters(vllm: Path, module: str, node: ast.AST) -> set[str]:
    """The keywords that a call of this function or class takes; "**" if it takes any."""
    if isinstance(node, FUNCTIONS):
        names = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        return names | ({"**"} if node.args.kwarg else set())
    assert isinstance(node, ast.ClassDef), ast.dump(node)[:100]
    names = set[str]()
    for origin, one in bases(vllm, module, node):
        for part in one.body:
            match part:
                case ast.AnnAssign(target=ast.Name(id=field)):
                    names.add(field)
                case ast.FunctionDef(name="__init__"):
                    return names | parameters(vllm, origin, part)
    return names


def asked() -> list[tuple[str, str, str]]:
    """(our file, module of vLLM, name) of each import from vLLM."""
    return [
        (file.name, node.module, alias.name)
        for file in OURS
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
        if node.module and (node.module, alias.name) != ("vllm.version", "__version__")  # made by the build
    ]


def calls(name: str) -> list[ast.Call]:
    """Our calls of `name`, such as SamplingParams or self._llm.sleep."""
    nodes = (node for file in OURS for node in ast.walk(tree(file)))
    return [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func).removeprefix("base.") == name]


def keys_of(function: str, file: Path) -> set[str]:
    """The keys of all dicts of a function of ours."""
    (node,) = (n for n in ast.walk(tree(file)) if isinstance(n, FUNCTIONS) and n.name == function)
    dicts = [n for n in ast.walk(node) if isinstance(n, ast.Dict)]
    return {k.value for d in dicts for k in d.keys if isinstance(k, ast.Constant)} - {"head_dtype"}


def decorators(function: ast.AST) -> list[str]:
    return [ast.unparse(d) for d in function.decorator_list]  # type: ignore[attr-defined]  # it is a function


def members(file: Path, name: str) -> set[str]:
    """The names of a class of ours."""
    (node,) = (n for n in tree(file).body if isinstance(n, ast.ClassDef) and n.name == name)
    assigned = {
        t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    }
    return assigned | {n.name for n in node.body if isinstance(n, FUNCTIONS)}


def senders(vllm: Path) -> str:
    folder = vllm / "distributed/weight_transfer"
    return "".join((folder / f"{kind}_engine.py").read_text() for kind in ("nccl", "ipc"))


def method(vllm: Path, module: str, name: str, function: str) -> Any:
    node = defined(vllm, module, name)
    assert isinstance(node, ast.ClassDef), f"{module} has no class {name}"
    found = (f for _, c in bases(vllm, module, node) for f in c.body if getattr(f, "name", "") == function)
    return next(found, None)


def test_what_is_imported_exists_and_takes_the_keywords(vllm: Path) -> None:
    assert len(asked()) > 20
    there = {
        (file, name): d for file, module, name in asked() if (d := (module, defined(vllm, module, name)))[1]
    }
    for file, module, name in asked():  # of alternatives, one
        assert (file, name) in there, f"{file}: {module} has no {name}"
    for (file, name), (module, node) in there.items():
        for call in calls(name):
            keywords = {k.arg for k in call.keywords if k.arg}
            known = parameters(vllm, module, node)
            assert "**" in known or keywords <= known, f"{file}: {name} takes no {keywords - known}"


def test_the_engine_has_the_methods_that_are_called(vllm: Path) -> None:
    module = "vllm.v1.engine.async_llm"
    used = {ast.unparse(n) for n in ast.walk(tree(OURS[1])) if isinstance(n, ast.Attribute)}
    names = {u.removeprefix("self._llm.") for u in used if re.fullmatch(r"self\._llm\.\w+", u)}
    names |= {
        "init_weight_transfer_engine",
        "start_weight_update",
        "finish_weight_update",
    }  # `transfer` calls them
    assert len(names) > 10
    for name in names:
        function = method(vllm, module, "AsyncLLM", name)
        assert function is not None, f"AsyncLLM has no {name}"
        for call in calls(f"self._llm.{name}"):
            keywords = {k.arg for k in call.keywords}
            known = parameters(vllm, module, function)
            assert keywords <= known and len(call.args) < len(known), f"{name} takes {known}, not {keywords}"


def test_settings_and_sampling_parameters_are_fields(vllm: Path) -> None:
    engine, process = OURS[1], OURS[2]
    assert (engine.name, process.name) == ("engine.py", "process.py")
    for function, file, module, name in (
        ("vllm_settings", engine, "vllm.engine.arg_utils", "AsyncEngineArgs"),
        ("parameters", process, "vllm.sampling_params", "SamplingParams"),
    ):
        node = defined(vllm, module, name)
        assert node is not None
        keys, known = keys_of(function, file), parameters(vllm, module, node)
        assert len(keys) > 8 and keys <= known, f"{name} has no {keys - known}"


def test_what_ours_replaces_or_implements_has_its_form(vllm: Path) -> None:
    (worker,) = (file for file in OURS if file.name == "worker.py")
    (ours,) = (n for n in tree(worker).body if getattr(n, "name", "") == "sample_with_exact_logprobs")
    replaced = method(vllm, "vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler", "forward_cpu")
    assert [a.arg for a in ours.args.args] == [a.arg for a in replaced.args.args]  # type: ignore[attr-defined]  # both are functions
    base = "vllm.distributed.weight_transfer.base"
    engine = defined(vllm, base, "WeightTransferEngine")
    assert isinstance(engine, ast.ClassDef)
    abstract = {f.name for f in engine.body if isinstance(f, FUNCTIONS) and "abstractmethod" in decorators(f)}
    assert abstract and abstract <= members(worker, "FileWeightTransfer")


def test_the_source_of_weights_has_what_vllms_senders_read(vllm: Path) -> None:
    read = set(re.findall(r"\bsource\.(\w+)", senders(vllm)))
    assert "metadata" in read and read - {"implements_iter_full", "owned_names"} <= members(
        OURS[-1], "Source"
    )
    text = (vllm / "distributed/weight_transfer/base.py").read_text()
    (source,) = (n for n in tree(OURS[-1]).body if getattr(n, "name", "") == "Source")
    (metadata,) = (f for f in source.body if getattr(f, "name", "") == "metadata")  # type: ignore[attr-defined]
    assert "must be a functools.cached_property" not in text or decorators(metadata) == ["cached_property"]


def test_the_relay_has_what_vllms_sender_calls(vllm: Path) -> None:
    called = set(re.findall(r"client\.(\w+)\(", senders(vllm)))
    assert called and called <= members(OURS[-1], "Relay")


def test_environment_variables_are_vllms(vllm: Path) -> None:
    text = (vllm / "envs.py").read_text()
    names = {n for file in OURS for n in re.findall(r'"(VLLM_\w+)"', file.read_text())}
    assert len(names) > 4
    for name in names:
        assert f'"{name}"' in text, name
