"""What transformers' Auto classes see of a converted folder: a config of type `attngap`, and a class that loads it."""

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
        if ignored - {"adapter_kwargs", "_from_auto", "name_or_path", "code_revision"}:
            raise AttngapError(
                f"A converted folder does not take {', '.join(sorted(ignored))}. "
                "Load it with attngap.load, then move or change the model"
            )
        chosen = dtype or torch_dtype
        model, _ = load_converted(path, dtype=None if chosen == "auto" else chosen)
        return model


# On import, and not in a function: attngap.autoload imports this module the moment transformers' registry is loaded.
AutoConfig.register(MODEL_TYPE, ConvertedConfig, exist_ok=True)
for auto in (AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM):
    auto.register(ConvertedConfig, ConvertedModel, exist_ok=True)  # pyright: ignore[reportArgumentType]
