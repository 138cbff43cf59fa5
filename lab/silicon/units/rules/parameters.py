"""All rules by the parameter that they give, the names that have none and why, and a table of a
file's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cycle_model import gpus
from cycle_model.parameters.parameter import MEASURED, Gpu, Parameter, Table
from lab.silicon.units.rules import of_launches, of_memory, of_sm, of_tensor
from lab.silicon.units.rules.arithmetic import Missing, Rows
from lab.silicon.units.rules.rule import Rule

RULES: dict[str, tuple[Rule, ...]] = {
    **of_sm.RULES,
    **of_memory.RULES,
    **of_tensor.RULES,
    **of_launches.RULES,
}
"""Of several rules the first one counts whose rows are all there."""

UNRULED = {
    "issue_uniform": "nothing but the compiler issues uniform instructions",
    "latency_plain": "of instructions that stand in no list",
    "latency_uniform": "nothing but the compiler issues uniform instructions",
    "special_queue": "read off kernels, see notes/log.md",
    "operands_read": "until a scoreboard of operands is free: no instruction tells it apart",
    "mma_issue": "only its sum with the latency of a commit is measured, which is in that one",
    "sms_that_share": "read off how the rate of L2 grows with readers that are apart: 132 / 8",
    "hbm_tail": "chosen by the model beside `touch`, behind other work",
}


def gpu_of(name: str) -> Gpu:
    """The GPU of the model that a device's name has as a word, such as "NVIDIA H200". ValueError
    where there is none."""
    found = next((word for word in name.split() if word in gpus.GPUS), name)
    return gpus.named(found)


def table_of(rows: Sequence[dict[str, Any]], file: str, name: str = "") -> Table:
    """What rows of `bench.py units` say of the parameters of a GPU. file: their name, for the
    source of each. name: of the device; without one that of the rows. ValueError for a GPU without
    parameters, and for rows of another one."""
    setting = rows[0] if rows and "benchmark" not in rows[0] else {}
    measured = setting.get("device", {}).get("name", "")
    name = name or measured
    if not name:
        raise ValueError(f"{file} does not say which GPU it is of; --gpu does")
    gpu, words = gpu_of(name), measured.split()
    if (other := next((word for word in words if word in gpus.GPUS), gpu.name)) != gpu.name:
        raise ValueError(f"{file} is of {measured!r}, an {other}, not of {name!r}")
    known, parameters, kept = Rows(rows), {}, {}
    for each, base in gpu.parameters.items():
        if each in UNRULED:
            kept[each] = UNRULED[each]
            continue
        try:
            parameters[each] = _measured(RULES[each], known, gpu, base.unit, file)
        except Missing as error:
            kept[each] = str(error)
    return Table(name, setting.get("date", ""), file, parameters, kept)


def _measured(rules: Sequence[Rule], rows: Rows, gpu: Gpu, unit: str, file: str) -> Parameter:
    missing = Missing(f"kernels on {gpu.name} were judged with the number that is there")
    for rule in rules:
        if rule.not_for == gpu.arch:
            continue
        try:
            return Parameter(*rule.figure(rows), unit, MEASURED, f"{file}: {rule.words}")
        except Missing as error:
            missing = error
    raise missing
