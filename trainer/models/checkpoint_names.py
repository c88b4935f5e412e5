"""The names that parameters have in a checkpoint, where they differ from those in transformers' modules."""

from collections.abc import Iterator

from torch import Tensor


def as_in_checkpoint(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter under its checkpoint names: transformers stacks a layer's experts into one tensor,
    (E, 2I, H) or (E, H, I), where checkpoints and vLLM have one tensor for each expert."""
    layer, is_expert, kind = name.partition(".experts.")
    if not is_expert or kind not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for i, expert in enumerate(tensor):
        if kind == "down_proj":
            yield f"{layer}.experts.{i}.down_proj.weight", expert
        else:
            for projection, half in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                yield f"{layer}.experts.{i}.{projection}.weight", half
