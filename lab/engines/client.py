"""Requests over HTTP: `python -m lab.engines.client JOB RESULT`, both files of JSON.

JOB: {"engine": "vllm" or "sglang", "url", "at_once", "requests": [{"prompt": [token, ...],
"tokens": n, "stream": bool, "leave_after": n or null}, ...]}. A request with `leave_after` closes
its connection after so many tokens, as a user does who goes away.
RESULT: [{"tokens": [...], "left": bool, "seconds": to the first token}, ...].
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

LIMIT = aiohttp.ClientTimeout(total=900)


def vllm_body(request: dict[str, Any], model: str) -> dict[str, Any]:
    """A request of vLLM's completions, with tokens instead of text."""
    return {
        "model": model, "prompt": request["prompt"], "max_tokens": request["tokens"],
        "temperature": 0, "ignore_eos": True, "return_token_ids": True, "detokenize": False,
        "stream": request["stream"],
    }  # fmt: skip


def vllm_tokens(answer: dict[str, Any], known: list[int]) -> list[int]:
    """All tokens so far; a piece of a stream has the new ones."""
    return [*known, *(answer["choices"][0].get("token_ids") or [])] if answer["choices"] else known


def sglang_body(request: dict[str, Any], model: str) -> dict[str, Any]:
    """A request of SGLang's own endpoint."""
    sampling = {"temperature": 0, "max_new_tokens": request["tokens"], "ignore_eos": True}
    return {
        "input_ids": request["prompt"], "sampling_params": sampling, "stream": request["stream"],
    }  # fmt: skip


def sglang_tokens(answer: dict[str, Any], known: list[int]) -> list[int]:
    """All tokens so far: each piece of a stream repeats those before it."""
    return list(answer["output_ids"])


ENGINES = {
    "vllm": ("/v1/completions", vllm_body, vllm_tokens),
    "sglang": ("/generate", sglang_body, sglang_tokens),
}


async def _pieces(response: aiohttp.ClientResponse, stream: bool) -> AsyncIterator[dict[str, Any]]:
    """Answers of a response: one, or those of its events."""
    if not stream:
        yield await response.json()
        return
    async for line in response.content:
        text = line.decode().removeprefix("data:").strip()
        if line.startswith(b"data:") and text != "[DONE]":
            yield json.loads(text)


async def _ask(session: Any, job: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    path, body, tokens_of = ENGINES[job["engine"]]
    tokens: list[int] = []
    begun, first, left = time.monotonic(), None, False
    async with session.post(job["url"] + path, json=body(request, job["model"])) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:1000]}")
        async for piece in _pieces(response, request["stream"]):
            if "error" in piece:
                raise RuntimeError(str(piece["error"]))
            tokens = tokens_of(piece, tokens)
            first = time.monotonic() - begun if first is None else first
            left = request["leave_after"] is not None and len(tokens) >= request["leave_after"]
            if left:
                response.close()  # the server has to notice
                break
    return {"tokens": tokens, "left": left, "seconds": first}


async def perform(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Send all requests, `at_once` of them at a time."""
    turn = asyncio.Semaphore(job["at_once"])
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=LIMIT, connector=connector) as session:

        async def ask(request: dict[str, Any]) -> dict[str, Any]:
            async with turn:
                return await _ask(session, job, request)

        return await asyncio.gather(*map(ask, job["requests"]))


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    answers = asyncio.run(perform(json.loads(job_file.read_text(encoding="utf-8"))))
    result_file.write_text(json.dumps(answers), encoding="utf-8")
