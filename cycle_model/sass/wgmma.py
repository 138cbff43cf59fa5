"""Whether ptxas let the products of Hopper's tensor core overlap.

Where ptxas cannot prove that registers of a wgmma in flight stay as they are, or has too few of
them, it serialises every wgmma of the kernel: each becomes a group of its own and is waited for
before the next one is issued. It says so in an advisory (C7510 to C7515) that `ptxas -v` prints
and the DSL does not; the machine code tells as well.
"""

from __future__ import annotations

from cycle_model.sass.flow import Function

PRODUCTS = ("HGMMA", "QGMMA", "IGMMA", "BGMMA")
WAIT = "WARPGROUP.DEPBAR"
GROUP_ENDS = "gsb0"  # an operand of the last product of a group
FOR_ALL = "0x0"  # of the wait: no group may be in flight


def is_serialised(function: Function) -> bool | None:
    """Whether each product ends a group, and behind each, before the next, all groups are waited
    for; None where nothing is multiplied. A kernel that asks for just that counts as well."""
    marks = [item for item in function.instructions if item.opcode.startswith((*PRODUCTS, WAIT))]
    products = [n for n, item in enumerate(marks) if not item.opcode.startswith(WAIT)]
    if not products:
        return None
    for n in products:
        waits = n + 1 < len(marks) and marks[n + 1].opcode.startswith(WAIT)
        ends = marks[n].operands.endswith(GROUP_ENDS)
        if not (ends and waits and marks[n + 1].operands.endswith(FOR_ALL)):
            return False
    return True
