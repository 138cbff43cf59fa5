"""The entry point of the platform; it imports nothing of vLLM."""


def platform() -> str:
    """Return the class that vLLM uses as its platform."""
    return "lab.engines.harness.vllm_platform.EmulatedPlatform"
