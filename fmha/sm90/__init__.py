"""The Hopper (sm_90a) attention kernel."""
