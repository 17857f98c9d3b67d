"""Which tokens are held, turn by turn, by what queries make of keys (`attngap.mechanisms.turns`)."""

from attngap.ops.holding.choosing import FADING, Chosen, Turns, choose

__all__ = ["FADING", "Chosen", "Turns", "choose"]
