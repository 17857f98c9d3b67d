"""The options that say in what precision and on which device a model is loaded."""

from typing import Annotated, Any

import typer

from attngap.options import DEVICES, DTYPES

Dtype = Annotated[
    str, typer.Option("--dtype", help=f"Precision of the model: {', '.join(DTYPES)}; auto is the checkpoint's own.")
]
Device = Annotated[
    str, typer.Option("--device", help=f"Where it runs: {', '.join(DEVICES)}; auto takes an accelerator if there is.")
]
MaxMemory = Annotated[
    str | None, typer.Option("--max-memory", help="Weights held at a time, such as 8GB; the others stay on disk.")
]
DTYPE, DEVICE = "float32", "cpu"


def placed(dtype: str, device: str, max_memory: str | None = None) -> dict[str, Any]:
    """For `attngap.load`, checked."""
    from attngap.models.placement import parse_device, parse_dtype, parse_size

    found = {"dtype": parse_dtype(dtype), "device": parse_device(device)}
    return found if max_memory is None else found | {"max_memory": parse_size(max_memory)}
