"""One forward pass without a cache, and what to read off it."""

import inspect
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from attngap.models.placement import device_of


def forward(model: PreTrainedModel, tokens: Int[Tensor, "b t"], last: int | None = None) -> Any:
    """The model's result; logits of the `last` tokens only, where that is said and the model can leave out the others.

    A decoder that reads an encoder gets the same tokens on both sides.
    """
    options: dict[str, Any] = {}
    tokens = tokens.to(device_of(model))
    if model.config.is_encoder_decoder:
        options["decoder_input_ids"] = tokens
    if getattr(model.config, "use_cache", None) is not None:
        options["use_cache"] = False
    if last is not None and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = last
    return model(input_ids=tokens, **options)


def body_of(model: PreTrainedModel) -> Any:
    """The model without its head, for observers: logits of a large vocabulary cost more than all the attention."""
    return model if model.config.is_encoder_decoder else model.base_model


def outputs(model: PreTrainedModel, tokens: Int[Tensor, "b t"], last: int | None = None) -> Tensor:
    """Logits, of the `last` tokens only where that is said; or an encoder's last hidden states."""
    result = forward(model, tokens, last)
    logits = getattr(result, "logits", None)
    return result.last_hidden_state if logits is None else logits if last is None else logits[:, -last:]


def embedding(result: Any) -> Float[Tensor, "b d"]:
    """Mean over tokens, normalized: what sentence encoders compare."""
    return nn.functional.normalize(result.last_hidden_state.mean(1), dim=-1)


def is_language_model(model: PreTrainedModel) -> bool:
    """Whether the model predicts tokens, so that damage is a KL divergence; an encoder's is a change of its states."""
    return model.get_output_embeddings() is not None


def predicts_next(model: PreTrainedModel) -> bool:
    """Whether the model writes text; a masked language model predicts tokens too, but none that comes next."""
    return is_language_model(model) and model.can_generate()
