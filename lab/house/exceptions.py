"""Where a rule is broken on purpose: (rule, subject) -> the reason. A stale entry fails.

A subject is a file, or `file::Class.function`, as a finding prints it.
"""

from __future__ import annotations

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("function_length", "fmha/api.py::attention"): (
        "the docstring is the contract of all its arguments, and help() shows it in one place"
    ),
    ("function_length", "gqa_lowlatency/api.py::decode"): (
        "the docstring is the contract of all its arguments, and help() shows it in one place"
    ),
    **{
        ("parameter_count", f"blackwell_engines/vllm/backend.py::BlackwellKernels{name}"): (
            "the signature is vLLM's, which gives these by position"
        )
        for name in ("Backend.supports_combination", "Impl.__init__", "Impl.forward")
    },
    ("package_readme_length", "kernelkit/README.md"): (
        "the handbook of all packages: glossary, anatomy, rules of the DSL and how to add things"
    ),
    ("markdown_line_length", "notes/log.md"): (
        "entries stay as they were written, and links of the index are as long as their headings"
    ),
}
