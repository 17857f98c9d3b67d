"""A verdict a person understands, from a head's numbers."""

from attngap.diagnosis.result import Head, Kind

# Cut-offs of words, set by hand: no number of a diagnosis depends on them, and which heads are kept goes by importance.
# Only without an estimate of damage (--quick) do they say what looks needed.
RETRIEVES = 0.2  # mean weight on the token to copy, on the stress passage
PREVIOUS = 0.4  # mean weight on the token before
WINDOW_ENOUGH = 0.02  # far mass below which nothing distant is read to speak of


def set_verdicts(heads: list[Head], keep: float, rank: int | None, unit: str = "nats") -> None:
    """Set `verdict` and `reason`: keep the share `keep` of heads that matter most, name what the others do."""
    scored = sorted((head for head in heads if head.importance is not None), key=lambda head: -(head.importance or 0.0))
    kept = {head.id for head in scored[: round(keep * len(scored))]}
    totals = (sum((h.damage or 0.0 for h in scored), 0.0), sum((h.recall_damage or 0.0 for h in scored), 0.0))
    for head in heads:
        head.kind = kind_of(head)
        if head.verdict == "linear":
            head.reason += f"; {character(head)}"
            continue
        if not head.replaceable:
            head.verdict = "keep"  # its reason was set by what forbids a replacement
            if head.unavoidable is not None:
                head.reason += f"; the best weights of rank {rank} would cost {_short(head.unavoidable)} {unit} on text"
                head.reason += f", {_short(head.recall_unavoidable or 0.0)} on recall"
            continue
        needed = head.id in kept if head.importance is not None else _looks_needed(head)
        head.verdict = "keep" if needed else "window" if _far(head) < WINDOW_ENOUGH else "replace"
        head.reason = _reason(head, rank, unit, totals)


def _far(head: Head) -> float:
    """The most it reads beyond the window, on text or where a sequence repeats."""
    return max(head.far, head.stress_far or 0.0)


def _looks_needed(head: Head) -> bool:
    """Without a damage estimate: does it copy, or select far away?"""
    return (head.induction or 0.0) >= RETRIEVES or (head.far > 0.3 and (head.kappa or 0.0) >= 1)


def _reason(head: Head, rank: int | None, unit: str, totals: tuple[float, float]) -> str:
    what = character(head)
    if head.verdict == "window":
        return f"{what}; a window is enough, at most {_far(head):.1%} lies beyond it"
    if head.damage is None:
        return what
    text, recall = head.damage, head.recall_damage or 0.0
    if head.verdict == "replace":
        return f"{what}; costs {_short(text)} {unit} on text, {_short(recall)} on recall"
    return "; ".join(part for part in (_decided(head, unit, totals), what, _floors(head, rank), _remains(head)) if part)


def _decided(head: Head, unit: str, totals: tuple[float, float]) -> str:
    """The number that made it a head to keep first, then the other."""
    costs = {"text": head.damage or 0.0, "recall": head.recall_damage or 0.0}
    shares = {name: cost / (total or 1.0) for (name, cost), total in zip(costs.items(), totals, strict=True)}
    first, second = sorted(costs, key=lambda name: -shares[name])
    return (
        f"kept for {first}: replacing it costs {_short(costs[first])} {unit} there, {shares[first]:.1%} of all heads' "
        f"(on {second} {_short(costs[second])}, {shares[second]:.1%})"
    )


def _floors(head: Head, rank: int | None) -> str:
    if head.floor is None:
        return ""
    recall = "" if head.stress_floor is None else f", {head.stress_floor:.1%} on recall"
    return f"no weights of rank {rank} come nearer than {head.floor:.1%} on text{recall}"


def _remains(head: Head) -> str:
    """How much of each damage the best weights of the rank would leave."""
    found = []
    for name, damage, least in (
        ("text", head.damage, head.unavoidable),
        ("recall", head.recall_damage, head.recall_unavoidable),
    ):
        if damage and least is not None:
            found.append(f"{min(1.0, least / damage):.0%} of its damage on {name}")
    return f"with the best of them {' and '.join(found)} would remain" if found else ""


def kind_of(head: Head) -> Kind:
    """What the head does: the first of these that fits."""
    tests: dict[Kind, bool] = {
        "retrieval": (head.induction or 0.0) >= RETRIEVES,
        "duplicate": (head.duplicate or 0.0) >= RETRIEVES,
        "previous": (head.previous or 0.0) >= PREVIOUS,
        "sink": head.sink >= 0.5,
        "local": head.near >= 0.5,
        "selective": (head.kappa or 0.0) >= 1,
    }
    for kind, fits in tests.items():
        if fits:
            return kind
    return "broad"


def character(head: Head) -> str:
    """The same in a few words."""
    return {
        "retrieval": f"a retrieval head: puts {head.induction or 0:.0%} on the token to copy when text repeats",
        "duplicate": f"finds earlier copies of the same token ({head.duplicate or 0:.0%})",
        "previous": f"reads the token before ({head.previous or 0:.0%})",
        "sink": f"{head.sink:.0%} on the first tokens, {head.near:.0%} nearby, {head.far:.0%} far",
        "local": f"mostly local: {head.near:.0%} nearby, {head.far:.0%} far",
        "selective": f"selects single tokens, {head.far:.0%} of it far away",
        "broad": f"spreads widely: {head.far:.0%} far, top weight {head.top:.0%}",
    }[head.kind]


def _short(value: float) -> str:
    return f"{value:.1g}" if value < 0.01 else f"{value:.2f}"
