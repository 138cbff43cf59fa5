"""Tests of what adaptors of engines share."""
