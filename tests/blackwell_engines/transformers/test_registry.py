"""`register`: the names that transformers then has; nothing is imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from blackwell_engines.transformers import NAME, register
from blackwell_engines.transformers.attention import attention_forward
from blackwell_engines.transformers.masks import keys_in_sight

IMPORTS = """
import sys
import blackwell_engines.transformers as ours
assert {"register", "NAME"} <= {*dir(ours)}
print(*({"transformers", "torch", "fmha"} & {*sys.modules}))
"""
WITHOUT = """
import sys
sys.modules["transformers"] = None
from blackwell_engines.transformers import register
register()
"""


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_nothing_is_imported_before_it_is_asked_for():
    done = run(IMPORTS)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip()


def test_without_transformers_there_is_a_way_to_get_it():
    done = run(WITHOUT)
    assert "ImportError: blackwell_engines.transformers needs transformers 5" in done.stderr
    assert "pip install 'blackwell-kernels[transformers]'" in done.stderr


def test_transformers_knows_the_names():
    assert register() == register() == NAME
    assert AttentionInterface()[NAME] is attention_forward
    assert AttentionMaskInterface()[NAME] is keys_in_sight


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_name_of_another_implementation_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' is registered for another implementation"):
        register(name)


def test_an_older_interface_is_refused(monkeypatch):
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match="q_length, q_offset"):
        register()
