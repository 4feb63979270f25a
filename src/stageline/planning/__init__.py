"""From a model to a plan: where it is cut, into how many microbatches, what is computed once more, in which order."""
