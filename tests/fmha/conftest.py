"""What tests of several files here share."""

from tests.attentions import no_compile, poisoned_outputs  # noqa: F401
