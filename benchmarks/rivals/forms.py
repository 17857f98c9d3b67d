"""What a budget is best spent on: how many tokens replaced groups hold, whether half of them from anywhere in the
context or the last alone, and whether with features or without.

The less a replaced group holds, the more groups can keep everything. Each form is judged at the number of groups it
leaves room for, on slices of calibration text of the length: by the geometric mean of its divergences where numbers
are asked for, on a repeated sequence and on text, so that halving the damage to recall counts as much as halving that
to text. No context of the tables takes part.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conversions import FORMS, Form, Parts, best, load_parts, our_scores
from heads import Scores
from scores import heads_of, slices, tokenizer_of

WINDOWS = (16, 32, 64, 128, 256, 512)  # fixed before ours had answered anything
SEED = 21  # scores of heads read other passages


def forms(options: argparse.Namespace) -> None:
    """Judge every form at every budget and length that is not judged yet, and note the best."""
    from attngap.mechanisms.most_missed import ROWS

    parts = load_parts(options.output, options.model, None)
    scores = our_scores(options.output)
    tokenizer, path = tokenizer_of(options.output), options.output / FORMS
    found = json.loads(path.read_text()) if path.exists() else {}
    for length in options.lengths:
        missing = [budget for budget in options.budgets if str(budget) not in found.get(str(length), {})]
        if not missing:
            continue
        queries: dict[int, list[Any]] = {}  # of each layer, the last before each slice

        def note(layer: int, seen: Any, before: slice, queries=queries) -> None:
            queries.setdefault(layer, []).append(seen.q[:, :, before][:, :, -ROWS:].clone())

        sizes = {"facts": length, "text": length, "seed": SEED}
        pieces = slices(parts.original, tokenizer, max(WINDOWS), **sizes, asking=note)
        judged = judge(parts, scores, pieces, queries, missing, length)
        found.setdefault(str(length), {}).update({str(budget): rows for budget, rows in judged.items()})
        path.write_text(json.dumps(found, indent=1))
        for budget, rows in judged.items():
            print(length, budget, rows[0] if rows else "nothing is small enough", flush=True)


def judge(
    parts: Parts,
    scores: Callable[[int], Scores],
    pieces: Sequence[Any],
    queries: Mapping[int, Sequence[Any]],
    budgets: Sequence[float],
    length: int,
) -> dict[float, list[dict[str, Any]]]:
    """The forms that fit each budget, the best first."""
    from attngap.conversion.joint import geometric_mean

    found: dict[float, list[dict[str, Any]]] = {budget: [] for budget in budgets}
    for form in all_forms():
        shaped = form.of(parts)
        reference = after_exact(shaped, pieces, queries)
        for budget in budgets:
            count = shaped.affordable(budget, length)
            if count < 0:
                continue
            losses = reference.divergence(heads_of(shaped, best(shaped, scores(form.window), count)))
            row = {**form._asdict(), "groups": count, "divergence": [round(x, 5) for x in losses.tolist()]}
            found[budget].append(row | {"mean": round(geometric_mean(losses), 5)})
    return {budget: sorted(rows, key=lambda row: row["mean"]) for budget, rows in found.items()}


def all_forms() -> list[Form]:
    """Half of a window's room goes to tokens from anywhere where that leaves a window to read."""
    from attngap.models.prefill import NARROWEST
    from attngap.options import HELD

    shares = {window: (0.0, HELD) if window > NARROWEST else (0.0,) for window in WINDOWS}
    return [Form(window, features, held) for window in WINDOWS for features in (True, False) for held in shares[window]]


def after_exact(parts: Parts, pieces: Sequence[Any], queries: Mapping[int, Sequence[Any]]) -> Any:
    """A reference whose slices follow states that were made as `attngap.models.prefill.hand_over` makes them."""
    from attngap.conversion.slices import SliceReference
    from attngap.mechanisms.most_missed import most_missed
    from attngap.models.prefill import shared_room

    reference = SliceReference(parts.original, parts.cached(), pieces)
    for place, piece in enumerate(pieces):
        for layer, mechanism in parts.mechanisms.items():
            k, v, rotary = piece.past.layers[layer].before(piece.start)
            narrow, more = shared_room(mechanism, parts.held)
            tokens = most_missed(narrow, queries[layer][place], k, v, rotary, more)
            reference.put_state(place, layer, narrow.state_after(k, v, rotary, tokens))
    return reference
