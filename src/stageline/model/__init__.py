"""From a model to stages."""
