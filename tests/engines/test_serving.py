"""Both servers under load, over HTTP: 200 requests, 8 at a time, some of which are aborted, while a
second client is killed. No kernel may be compiled while requests wait.
"""

from __future__ import annotations

import pytest

from lab.engines.load import under_load

pytestmark = pytest.mark.xdist_group("serving")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_200_requests(engine, environment):
    report = under_load(environment, engine, "llama", 200, 8, seed=7)
    assert report.ok, str(report)
    assert sum(answer["left"] for answer in report.answers) > 10


# vLLM gives each engine a memory node of its own, unless the second variable is set, even to 0.
TWO_ENGINES = {
    "vllm": (
        ["--data-parallel-size", "2"],
        {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_SIM_MULTI_NUMA": "0"},
    ),
    "sglang": (["--dp-size", "2"], {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
}


@pytest.mark.parametrize("engine", TWO_ENGINES)
def test_two_engines_behind_one_server(engine, environment):
    words, variables = TWO_ENGINES[engine]
    report = under_load(
        environment, engine, "llama", 24, 8, seed=8, variables=variables, words=words
    )
    assert report.ok, str(report)
