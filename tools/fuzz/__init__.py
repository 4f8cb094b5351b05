"""Fuzzing: readers of files that others wrote meet damaged and hostile ones. See docs/security.md."""
