"""Running one rank: its stages, one loop for every schedule, the backward in two halves. Needs torch."""
