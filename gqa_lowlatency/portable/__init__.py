"""The decode kernel of Hopper (sm_90a), which serves every GPU with mma.sync and cp.async: compute
capabilities 8.x and 12.x take it without clusters."""

WRITTEN_FOR = "sm_90a"  # other GPUs have configs of their own
