"""Altair charts from plain rows.

They stand below everything that measures, so that `diagnosis.plot()` in a notebook, the report and the explorer draw
the same picture; they import nothing of attngap but its error.
"""
