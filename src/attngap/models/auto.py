"""What transformers' Auto classes see of a converted folder: a config of type `attngap`, and a class that loads it.

A folder opens in two ordinary ways. Its config.json has an `auto_map` to CODE_FILE, a file of one import beside
it, so `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` works where attngap is installed but not
imported, and says what to install where it is not. And importing this module registers the classes, which needs no
flag: `import attngap` does so where transformers is loaded already, and so does all that loads, saves or converts.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
)

from attngap.errors import AttngapError
from attngap.models.compat import attention_of

MODEL_TYPE = "attngap"
AUTO_CLASSES = (AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM)
PASSED_ON = ("device_map", "local_files_only", "trust_remote_code")  # to the loading of the base model
# What the Auto classes put in on their own; nobody asked for it.
OWN = ("config", "adapter_kwargs", "name_or_path", "code_revision", "revision", "weights_only")
OWN += ("_from_auto", "_commit_hash")
CODE_FILE = "attngap_model.py"
CODE = '''"""Lets transformers open this converted model with trust_remote_code=True. It needs: pip install attngap"""

from attngap.models.auto import ConvertedConfig, ConvertedModel

__all__ = ["ConvertedConfig", "ConvertedModel"]
'''


def config_json(architecture: str) -> dict[str, Any]:
    """The config.json of a converted folder."""
    code = Path(CODE_FILE).stem
    models = {each.__name__: f"{code}.ConvertedModel" for each in AUTO_CLASSES}
    return {
        "model_type": MODEL_TYPE,
        "architectures": [architecture],
        "auto_map": {"AutoConfig": f"{code}.ConvertedConfig", **models},
    }


# The config.json of a converted folder; everything else is in its attngap.json. Made by a call, because transformers
# turns config classes into dataclasses that take more than their fields, which type checkers of class bodies refuse.
ConvertedConfig = type("ConvertedConfig", (PretrainedConfig,), {"model_type": MODEL_TYPE, "__module__": __name__})


class ConvertedModel:
    """Opens the folder and returns the converted model, of its own architecture's class."""

    config_class = ConvertedConfig

    @classmethod
    def from_pretrained(
        cls,
        path: Any,
        *args: Any,
        dtype: Any = None,
        torch_dtype: Any = None,
        attn_implementation: str | None = None,
        **options: Any,
    ) -> PreTrainedModel:
        from attngap.models.save import load_converted_model

        config = options.get("config")  # where the Auto classes put what they were asked for
        asked = attn_implementation or (None if config is None else attention_of(config))
        if asked not in (None, "sdpa", MODEL_TYPE):
            raise AttngapError(
                f"attn_implementation={asked!r} would undo the conversion. Load the original for another attention"
            )
        refused = [name for name, value in options.items() if value and name not in (*PASSED_ON, *OWN)]
        if refused:
            raise AttngapError(
                f"A converted folder does not take {', '.join(sorted(refused))}. It takes dtype, "
                f"{', '.join(PASSED_ON)}; load it so, then change the model"
            )
        chosen = dtype if dtype is not None else torch_dtype
        given = {name: options[name] for name in PASSED_ON if options.get(name) is not None}
        return load_converted_model(Path(path), dtype=_dtype(chosen), **given)


def _dtype(chosen: Any) -> torch.dtype | None:
    """None leaves the base in float32, which is what every figure of a receipt was measured in."""
    if chosen is None or chosen == "auto" or isinstance(chosen, torch.dtype):
        return None if chosen == "auto" else chosen
    found = getattr(torch, str(chosen).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise AttngapError(f"No dtype {chosen!r}. Such as: float32, bfloat16, float16")
    return found


AutoConfig.register(MODEL_TYPE, ConvertedConfig, exist_ok=True)
for auto in AUTO_CLASSES:
    auto.register(ConvertedConfig, ConvertedModel, exist_ok=True)  # pyright: ignore[reportArgumentType]
