"""The suite itself: tiers, times, the budget, coverage."""
