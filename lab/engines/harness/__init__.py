"""Plugins that let the engines run on a CPU without their extensions, and watch our adapters."""
