"""The real vLLM and SGLang on the CPU, with the kernels of this repository in the emulator."""
