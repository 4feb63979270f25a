"""Schedules made for given costs under a cap on memory, and bounds that say how far from the best they can be."""
