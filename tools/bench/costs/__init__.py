"""Subjects that measure something other than a stream of batches."""
