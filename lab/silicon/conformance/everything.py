"""All conformance cases, and what a session learns from them: the document that is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from lab.silicon.conformance import (
    atomics,
    barriers,
    calls,
    copies,
    coverage,
    elementwise,
    lane_matrices,
    matrices,
    memory,
    misc,
    patterns,
    peers,
    pixels,
    programs,
    tensors,
    unavailable,
    warp,
    wgmma,
    wgmma_sparse,
)
from lab.silicon.conformance.campaign import Campaign, Outputs, Tally
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.patterns import Variant

_STRUCTURED = (
    memory,
    atomics,
    barriers,
    copies,
    tensors,
    pixels,
    misc,
    programs,
    matrices,
    wgmma,
    wgmma_sparse,
    lane_matrices,
    peers,
    calls,
)

# a form -> why silicon and ptxemu differ in it
EXPLAINED = {
    "fns.b32": "an offset of -2^31: the code that ptxas expands fns to finds bit 0 of any mask that"
    " has it, while the manual's text finds nothing; ptxemu keeps to the text",
}


def variants() -> list[Variant]:
    """Every elementwise and warp variant, also those that a GPU may not have."""
    return [*patterns.variants(), *warp.variants()]


def cases(refused: Iterable[str], *, aligned: bool = False) -> Iterator[Case]:
    """Every case for a GPU whose compiler refuses these opcodes (`Variant.key`). aligned: also
    those whose bits are right with `accumulation="aligned"` alone."""
    dropped = set(refused)
    taken = [variant for variant in variants() if variant.key not in dropped]
    yield from elementwise.cases(taken)
    yield from itertools.chain.from_iterable(module.cases() for module in _STRUCTURED)
    if aligned:
        yield from wgmma.sums()


def recorded(record: dict) -> tuple[list[Case], list[str]]:
    """The cases that a record has results of, and what is newer than the record: opcodes that it
    has no results of, and names of programs that hold one or are new themselves."""
    refused = set(record["refused_for_this_gpu"])
    known = {*record["forms"], *record["approximations"]}
    newer = {variant.key for variant in variants()} - known - refused
    kept = []
    for case in cases(refused | newer):
        new = case.forms - known
        if new or (case.recorded and case.name not in record["silicon"]):
            newer |= {case.name, *new}
        elif case.recorded:
            kept.append(case)
    return kept, sorted(newer)


def recorded_sums(record: dict) -> list[Case]:
    """The cases that a record has sums of."""
    known = record.get("sums", {})
    found = cases(record["refused_for_this_gpu"], aligned=True)
    return [case for case in found if case.sums and case.name in known]


def is_recorded(record: dict, case: Case) -> bool:
    """Whether the record has results of all of its forms, and of the program where one is kept."""
    known = case.forms <= {*record["forms"], *record["approximations"]}
    return known and (not case.recorded or case.name in record["silicon"])


def unlike(record: dict, results: Iterable[tuple[Case, Outputs]]) -> Iterator[str]:
    """The cases whose outputs are others than the recorded ones, but for explained forms."""
    explained = set(record["explained"])
    for case, found in results:
        if case.sums:
            if case.digest_of_sums(found) != record["sums"][case.name]:
                yield case.name
        elif case.digest(found) != record["silicon"][case.name] and not case.forms & explained:
            yield case.name


def different(result: Campaign) -> dict[str, Tally]:
    """The forms whose results differ for no known reason."""
    return {
        form: tally
        for form, tally in sorted(result.forms.items())
        if not tally.right and form not in EXPLAINED
    }


def document(result: Campaign, setting: dict[str, str]) -> dict[str, object]:
    """Return the document that is kept of a campaign.

    A digest is kept of each program whose inputs are the same with any numpy and in which every bit
    counts. This excludes the programs of `tests/ptxemu/ptx`, which draw from numpy's generator, and
    products that are judged by a bound.

    `refused_for_this_gpu` has instructions that the driver's compiler does not accept for this GPU.
    `not_witnessed` has the items of ptxemu's registry that no program can show, each with the
    reason; nearly all are of other GPUs. `sums` has digests of products of any numbers, whose bits
    ptxemu has with `accumulation="aligned"`.
    """
    forms = dict(sorted(result.forms.items()))
    near = {form: tally for form, tally in forms.items() if tally.bound}
    listed = coverage.missing(forms, result.refused)
    return {
        "what": "ptxemu beside silicon: the same programs on the same inputs, form by form",
        "how": "python scripts/conformance.py --json FILE",
        "setting": setting,
        "summary": {
            "programs": result.programs,
            "with_digests": len(result.digests),
            "forms": len(forms),
            "inputs": sum(tally.inputs for tally in forms.values()),
            "same_bits": sum(tally.same == tally.inputs for tally in forms.values()),
            "within_bounds": sum(tally.right for tally in near.values()),
            "explained": sum(
                form in EXPLAINED and not tally.right for form, tally in forms.items()
            ),
            "different": len(different(result)),
            "failed": len(result.failures),
            "refused_for_this_gpu": len(result.refused),
            "not_witnessed": len(listed),
        },
        "forms": {form: [t.inputs, t.same] for form, t in forms.items() if not t.bound},
        "approximations": {
            form: {
                "inputs": tally.inputs,
                "same": tally.same,
                "bound": tally.bound,
                "gpu_error": float(f"{tally.errors[0]:.12g}"),
                "ptxemu_error": round(tally.errors[1], 4),
                "most_ulps_apart": tally.ulps,
            }
            for form, tally in near.items()
        },
        "explained": {
            form: why for form, why in EXPLAINED.items() if form in forms and not forms[form].right
        },
        "different": {form: tally.examples for form, tally in different(result).items()},
        "failed": result.failures,
        "refused_for_this_gpu": dict(sorted(result.refused.items())),
        "not_witnessed": {" ".join(item): why for item, why in listed.items()},
        "declined": dict(coverage.with_reasons()),
        "silicon": result.digests,
        "sums": result.sums,
    }


def refused_instructions(answers: dict[int, str]) -> dict[str, str]:
    """Opcode -> reason, of the lines of `unavailable`."""
    lines = unavailable.instructions()
    return {lines[k].split(" ")[0]: why for k, why in sorted(answers.items())}
