"""Text for people: tables of plans, progress, and the pieces that texts share."""

from memscale.report.tables import exact, fields, layer_label, place, table

__all__ = ["exact", "fields", "layer_label", "place", "table"]
