"""A verdict a person understands, from a head's numbers."""

from attngap.diagnosis.result import Head, Kind

RETRIEVES = 0.2  # mean weight on the token to copy, on the stress passage
PREVIOUS = 0.4
WINDOW_ENOUGH = 0.02  # far mass below which nothing distant is read to speak of


def set_verdicts(heads: list[Head], keep: float, rank: int | None, unit: str = "nats") -> None:
    """Set `verdict` and `reason`: keep the share `keep` of heads that matter most, name what the others do."""
    scored = sorted((head for head in heads if head.importance is not None), key=lambda head: -(head.importance or 0.0))
    kept = {head.id for head in scored[: round(keep * len(scored))]}
    for head in heads:
        head.kind = kind_of(head)
        if head.verdict == "linear":
            head.reason += f"; {character(head)}"
            continue
        if not head.replaceable:
            head.verdict = "keep"  # its reason was set by what forbids a replacement
            if head.unavoidable is not None:
                head.reason += f"; the best weights of rank {rank} would cost {_short(head.unavoidable)} {unit} on text"
            continue
        needed = head.id in kept if head.importance is not None else _looks_needed(head)
        head.verdict = "keep" if needed else "window" if head.far < WINDOW_ENOUGH else "replace"
        head.reason = _reason(head, rank, unit)


def _looks_needed(head: Head) -> bool:
    """Without a damage estimate: does it copy, or select far away?"""
    return (head.induction or 0.0) >= RETRIEVES or (head.far > 0.3 and (head.kappa or 0.0) >= 1)


def _reason(head: Head, rank: int | None, unit: str) -> str:
    what = character(head)
    if head.verdict == "window":
        return f"{what}; a window is enough, only {head.far:.1%} lies beyond it"
    if head.damage is None:
        return what
    cost = f"costs {_short(head.damage)} {unit} on text, {_short(head.recall_damage or 0.0)} on recall"
    if head.verdict == "replace":
        return f"{what}; {cost}"
    floor = f"floor at rank {rank} is {head.floor:.1%}" if head.floor is not None else ""
    return "; ".join(part for part in (what, cost, floor, _split(head, rank)) if part)


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


def _split(head: Head, rank: int | None) -> str:
    if head.damage is None or head.unavoidable is None or head.damage <= 0:
        return ""
    share = min(1.0, head.unavoidable / head.damage)
    if share >= 0.5:
        return f"{share:.0%} of that is unavoidable at rank {rank}"
    return f"a better feature map could win back {1 - share:.0%}"


def _short(value: float) -> str:
    return f"{value:.1g}" if value < 0.01 else f"{value:.2f}"
