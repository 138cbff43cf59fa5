"""gpt-oss from prompt to tokens on the kernels of this repository: `python -m examples.gpt_oss`."""
