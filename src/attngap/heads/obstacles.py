"""Why a layer's heads cannot be replaced."""

from attngap.heads.inputs import LayerInputs

BIAS = "stays: its logits carry a learned position bias, which no replacement here reproduces"
SLIDING = "stays: it has a sliding window already, so its cost is bounded"
LINEAR = "is linear already: an earlier conversion replaced it"
OBSTACLES = (BIAS, SLIDING, LINEAR)


def obstacle(inputs: LayerInputs) -> str | None:
    """What stands against a replacement in the inputs of a layer; None where nothing does."""
    if inputs.bias is not None:
        return BIAS
    if inputs.allowed is not None:
        return SLIDING
    return LINEAR if len(inputs.linear) == inputs.heads else None
