"""Speeds of a receipt are those of a model whose windows are full."""

from attngap.conversion.speed import speeds
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.models.mixed_layer import MixedLayer
from attngap.models.shapes import layer_shapes
from attngap.models.swap import swap
from tests.zoo import tiny


def test_decoding_is_timed_with_full_windows_and_features_in_use():
    """A window of 512 with a prompt of 320 tokens was timed half empty, and nothing far was ever read."""
    original = tiny()
    wide = {
        s.layer: (Hybrid(s.heads, s.dim, kv_heads=s.kv_heads, window=512, sinks=4).requires_grad_(False), [0])
        for s in layer_shapes(original)
    }
    converted = swap(original, wide)
    seen: list[tuple[int, float]] = []

    def look(model, args, given):
        tokens = given["input_ids"] if "input_ids" in given else args[0]
        if tokens.shape[1] == 1:
            layers = [layer for layer in given["past_key_values"].layers if isinstance(layer, MixedLayer)]
            seen.extend((int(layer.state["count"]), float(layer.state["z"].abs().sum())) for layer in layers)

    converted.register_forward_pre_hook(look, with_kwargs=True)
    found = speeds({"original": original, "converted": converted}, (1024,), prefill_up_to=0)
    assert [each.context for each in found["converted"]] == [1024]
    assert seen
    assert all(count >= 4 + 512 and far > 0 for count, far in seen)
