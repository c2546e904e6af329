"""What process ranks do. Functions, so that a fresh process finds them by name."""

from __future__ import annotations
