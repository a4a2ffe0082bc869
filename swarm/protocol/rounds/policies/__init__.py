"""The pure decisions of a round: rosters, deals, deadlines, checks and the next manifest."""
