"""What needs neither schedules nor torch: errors, files, checked JSON, human-readable units.

Nothing here imports another package of Stageline, numpy or torch. Read `errors` first: every error that a user can
catch is defined there.
"""
