"""Shared markers and the rule that nothing is skipped silently where everything should be there."""
