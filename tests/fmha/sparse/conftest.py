"""What tests of several files here share."""

from tests.kvcache.conftest import no_launches

__all__ = ["no_launches"]
