"""Readers: shardstream, and what users have today, each under the same batch contract."""
