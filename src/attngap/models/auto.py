"""What transformers' Auto classes see of a converted folder: a config of type `attngap`, and a class that loads it.

A folder opens in two ordinary ways. Its config.json has an `auto_map` to CODE_FILE, a file of one import beside
it, so `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` works where attngap is installed but not
imported, and says what to install where it is not. And importing this module registers the classes, which needs no
flag: `import attngap` does so where transformers is loaded already, and so does all that loads, saves or converts.
"""

from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
)

from attngap.errors import AttngapError

MODEL_TYPE = "attngap"
AUTO_CLASSES = (AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM)
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
        cls, path: Any, *args: Any, config: Any = None, dtype: Any = None, torch_dtype: Any = None, **options: Any
    ) -> PreTrainedModel:
        from attngap.models.save import load_converted

        ignored = {name for name, value in options.items() if value not in (None, False, "main", "sdpa", MODEL_TYPE)}
        if ignored - {"adapter_kwargs", "_from_auto", "name_or_path", "code_revision", "trust_remote_code"}:
            raise AttngapError(
                f"A converted folder does not take {', '.join(sorted(ignored))}. "
                "Load it with attngap.load, then move or change the model"
            )
        chosen = dtype or torch_dtype
        model, _ = load_converted(path, dtype=None if chosen == "auto" else chosen)
        return model


AutoConfig.register(MODEL_TYPE, ConvertedConfig, exist_ok=True)
for auto in AUTO_CLASSES:
    auto.register(ConvertedConfig, ConvertedModel, exist_ok=True)  # pyright: ignore[reportArgumentType]
