"""What runs where, in which order: actions, placements, families, rules and formats. No torch in here."""
