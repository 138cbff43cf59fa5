"""Which command made each file of results/."""

from __future__ import annotations

BENCH = "python scripts/bench.py"
OTHERS = "published by others"
COMMANDS = {
    "bringup-NVIDIA_H200-2026-11-28.json": "python scripts/bringup.py --gpus 0 1",
    "bringup-sm_100a_emulator-2026-11-28.json": "python scripts/bringup.py --arch sm_100a "
    "--emulate",
    "conformance_h100.json": "python scripts/conformance.py --accumulation aligned --json FILE",
    "dsv4_h100.json": f"{BENCH} dsv4 --json FILE",
    "dsv4_layer_h200.json": "python scripts/run.py dsv4 --experts 0 --steps 300 --json FILE",
    "eager_h200.json": f"{BENCH} eager --json FILE",
    "emulator_speed.json": f"{BENCH} emulator --json FILE",
    "first_call_cpu.json": f"{BENCH} first-call --json FILE",
    "first_call_h200.json": f"{BENCH} first-call --json FILE",
    "fmha_h200.json": f"{BENCH} fmha --rows anchor gpt-oss gqa mla hd512 fp8 --json FILE",
    "fmha_h200_flashinfer.json": f"{BENCH} fmha --rows anchor gpt-oss gqa mla fp8 --rounds 5 "
    "--json FILE",
    "fmha_mma_sync_h200.json": f"{BENCH} fmha --peers mma.sync fa2 --json FILE",
    "fmha_mma_sync_keys_h200.json": "means of launches behind each other (docs/portable.md)",
    "gpt_oss_h200.json": "python -m examples.gpt_oss --profile --json FILE",
    "gqa_h100.json": f"{BENCH} gqa --json FILE",
    "gqa_static.json": "python scripts/dump.py gqa --grid --json FILE",
    "kvcache_h100.json": f"{BENCH} kvcache --json FILE",
    "kvcache_host.json": f"{BENCH} kvcache-host --json FILE",
    "kvcache_tier_h100.json": f"{BENCH} kvcache-tier --json FILE",
    "merge_h100.json": f"{BENCH} merge --json FILE, by an earlier form of it",
    "merge_stacked_h100.json": f"{BENCH} merge --json FILE, by an earlier form of it",
    "model_b200_attention.json": "python scripts/cycles.py fmha --peers --perturbed 12 --json FILE",
    "model_b200_layers.json": "python scripts/cycles.py layers --json FILE",
    "model_h100/dsv4.json": f"{BENCH} dsv4 --json FILE",
    "model_h100/gqa.json": f"{BENCH} gqa --json FILE",
    "model_h100/gqa_variants.json": f"{BENCH} gqa --tune cluster=8 --json FILE, and other clusters",
    "model_h100/kvcache.json": f"{BENCH} kvcache --json FILE",
    "model_h100/merge.json": f"{BENCH} merge --json FILE",
    "model_h100/moe.json": f"{BENCH} moe --json FILE",
    "model_h200/fmha.json": "ncu; modelled by python scripts/cycles.py beside FILE --perturbed 4",
    "moe_h200.json": f"{BENCH} moe --json FILE",
    "moe_layers_h200.json": f"{BENCH} moe --model gpt-oss-120b --json FILE",
    "moe_layers_h200_deepseek.json": f"{BENCH} moe --model deepseek-v3 --json FILE",
    "moe_models.json": "python scripts/run.py models --json FILE",
    "moe_static.json": "python scripts/dump.py moe --grid --json FILE",
    "moe_tiles_b200.json": "python notes/moe_tiles.py",
    "ncu_h200.csv": "ncu, as python scripts/nsight.py NAME starts it; slimmed by python "
    "scripts/nsight.py table EXPORTS --out FILE",
    "published_attention_rivals.csv": OTHERS,
    "published_decode_rivals.csv": OTHERS,
    "published_fa4_b200.csv": OTHERS,
    "published_fa4_gb200.csv": OTHERS,
    "published_fa4_gb300.csv": OTHERS,
    "published_mainloops_b200.csv": OTHERS,
    "published_moe_rivals.csv": OTHERS,
    "q8_0_h200.json": f"{BENCH} q8_0 --json FILE",
    "test_coverage.json": "make tiers, which is python -m tests.support.pairs --save",
    "tuner_h200.json": "python -m kernelkit tune OPERATOR --random N --seed S --exhaustive --dry "
    "--json",
    "units_h100.json": f"{BENCH} units --json FILE",
    "units_h200.json": f"{BENCH} units --json FILE",
}
